//! Bars: parts of a whole in a row of cells.

use ballast_api::VmView;
use ratatui::style::Style;
use ratatui::text::Span;

use crate::table;
use crate::top::palette::Palette;

pub const RESIDENT: char = '█';
pub const COMPRESSED: char = '▒';
pub const SWAPPED: char = '▓';
pub const BALLOONED: char = '░';
pub const UNTOUCHED: char = '·';
pub const TARGET: char = '┃';
pub const ACTIVE: char = '◆';

/// Where each part ends, in cells of a bar of `width` for `total`. Never beyond `width`, and never
/// before the part's own begin.
pub fn ends(parts: &[u64], total: u64, width: usize) -> Vec<usize> {
    let mut sum = 0u64;
    let end = |part: &u64| {
        sum = sum.saturating_add(*part);
        position(sum, total, width)
    };
    parts.iter().map(end).collect()
}

/// The cell edge nearest to `value` of `total`, 0 to `width`.
pub fn position(value: u64, total: u64, width: usize) -> usize {
    if total == 0 {
        return 0;
    }
    let cells = (u128::from(value.min(total)) * width as u128 * 2 + u128::from(total))
        / (u128::from(total) * 2);
    usize::try_from(cells).unwrap_or(width).min(width)
}

/// The pages of a VM against its size, with the marks of target and, once there is one, active estimate.
pub fn of_vm(vm: &VmView, width: usize, palette: Palette) -> Vec<Span<'static>> {
    let m = &vm.memory;
    let mut backed =
        m.resident.saturating_add(m.shared).saturating_add(m.broken).saturating_add(m.staged);
    if backed == 0 {
        // Of a VM that is not paged only the total is known.
        backed = m.consumed;
    }
    let parts = [
        (backed, RESIDENT, palette.resident()),
        (m.compressed.saturating_add(m.filled), COMPRESSED, palette.compressed()),
        (m.swapped, SWAPPED, palette.swapped()),
        (m.ballooned, BALLOONED, palette.ballooned()),
    ];
    let size = vm.params.size;
    let mut cells = vec![(UNTOUCHED, palette.quiet()); width];
    let mut from = 0;
    for (end, (_, glyph, style)) in ends(&parts.map(|p| p.0), size, width).into_iter().zip(parts) {
        cells.iter_mut().take(end).skip(from).for_each(|cell| *cell = (glyph, style));
        from = end;
    }
    let target = (m.target, TARGET, palette.target());
    let active = table::estimate(vm).map(|bytes| (bytes, ACTIVE, palette.active()));
    for (value, glyph, style) in std::iter::once(target).chain(active) {
        let at = position(value, size, width).min(width.saturating_sub(1));
        if let Some(cell) = cells.get_mut(at) {
            *cell = (glyph, style);
        }
    }
    spans(&cells)
}

/// Cells of one style joined.
fn spans(cells: &[(char, Style)]) -> Vec<Span<'static>> {
    let same = cells.chunk_by(|a, b| a.1 == b.1);
    same.map(|run| {
        let style = run.first().map(|cell| cell.1).unwrap_or_default();
        Span::styled(run.iter().map(|cell| cell.0).collect::<String>(), style)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples;

    #[test]
    fn parts_never_leave_the_bar() {
        assert_eq!(ends(&[50, 25, 25], 100, 8), [4, 6, 8]);
        assert_eq!(ends(&[u64::MAX, u64::MAX], 10, 8), [8, 8]);
        assert_eq!(ends(&[1, 2], 0, 8), [0, 0]);
        assert_eq!(position(u64::MAX, u64::MAX, 200), 200);
    }

    #[test]
    fn a_bar_shows_every_state_and_both_marks() {
        // Of 256 MiB: 128 resident, 64 swapped, 32 ballooned, the rest untouched.
        let vm = samples::vm("a");
        let text = |width| -> String {
            of_vm(&vm, width, Palette::new(true)).iter().map(|s| s.content.to_string()).collect()
        };
        // Target 160 MiB at cell 20, active 96 MiB at cell 12.
        assert_eq!(text(32), "████████████◆███▓▓▓▓┃▓▓▓░░░░····");
        for width in 0..100 {
            assert_eq!(text(width).chars().count(), width);
        }
    }

    #[test]
    fn what_was_not_sampled_has_no_mark() {
        let mut vm = samples::vm("a");
        vm.active.periods = 0;
        let spans = of_vm(&vm, 32, Palette::new(true));
        let text: String = spans.iter().map(|s| s.content.to_string()).collect();
        assert_eq!(text, "████████████████▓▓▓▓┃▓▓▓░░░░····");
    }
}
