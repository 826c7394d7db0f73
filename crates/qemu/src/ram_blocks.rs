//! QEMU's list of RAM blocks, which it prints for people only.

use ballast_units::Bytes;

/// One block of memory that QEMU gave to its guest: the RAM, and small ones such as the BIOS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// As QEMU calls it: "mem", "pc.bios".
    pub name: String,
    /// 4 KiB, or more on hugetlb.
    pub page_size: Bytes,
    /// Its length in use.
    pub used: Bytes,
}

/// Reads the table of `info ramblock`; lines that are not of it are skipped.
pub(crate) fn parse(table: &str) -> Vec<RamBlock> {
    table.lines().filter_map(row).collect()
}

/// `name  4 KiB  offset  used  total  ...`, numbers in hexadecimal. Names may hold spaces.
fn row(line: &str) -> Option<RamBlock> {
    let (head, numbers) = line.split_at(line.find(" 0x")?);
    let used = numbers.split_ascii_whitespace().nth(1)?.strip_prefix("0x")?;
    let mut words = head.trim().rsplitn(3, char::is_whitespace);
    let unit = words.next()?;
    let number = words.next()?;
    Some(RamBlock {
        page_size: format!("{number}{unit}").parse().ok()?,
        name: words.next()?.trim().to_owned(),
        used: Bytes(u64::from_str_radix(used, 16).ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "              Block Name    PSize              Offset               Used              Total\r
                     mem    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000\r
                    huge    2 MiB  0x0000000004000000 0x0000000004000000 0x0000000004000000  0x00007f0000000000 rw\r
    /rom@etc/acpi tables    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000\r\n";

    #[test]
    fn the_table_of_qemu_7_and_of_later_ones_is_read() {
        let blocks = parse(TABLE);
        let shown: Vec<_> =
            blocks.iter().map(|b| (b.name.as_str(), b.page_size.0, b.used.0)).collect();
        assert_eq!(
            shown,
            [
                ("mem", 4096, 64 << 20),
                ("huge", 2 << 20, 64 << 20),
                ("/rom@etc/acpi tables", 4096, 0x20000)
            ]
        );
    }

    #[test]
    fn anything_else_is_skipped() {
        for bad in [
            "",
            "\n\n",
            " 0x",
            "mem 0x1 0x2",
            "mem 4 KiB 0x1",
            "m 4 XiB 0x1 0x2 0x3",
            "m 4 KiB 0x0 0xffffffffffffffffff 0x0",
            "é 0x 0x",
            "a b 0x0 zz",
        ] {
            assert_eq!(parse(bad), [], "{bad:?}");
        }
    }
}
