//! A web server over files of this guest's own, and over documents that every guest's disk has.

use std::fs;
use std::path::{Path, PathBuf};

use super::content::Content;
use super::place::{self, Daemon, STATE, outside};
use super::wire::{Wire, same};
use super::{Load, Random};

const PORT: u16 = 8080;
const FILE: usize = 32 << 10;
/// One request in so many is for a document of the packages.
const DOCUMENTS: u64 = 3;
const LARGEST_DOCUMENT: u64 = 256 << 10;

struct Web {
    content: Content,
    files: u64,
    /// As this process sees them.
    documents: Vec<PathBuf>,
}

pub fn start(kind: &str, content: Content, mb: u64) -> Result<(Daemon, Box<dyn Load>), String> {
    let files = (mb << 20) / FILE as u64;
    let www = format!("{STATE}/www");
    place::owned(&www)?;
    for n in 0..files {
        let path = outside(&www).join(n.to_string());
        fs::write(&path, content.text(n, 0, FILE)).map_err(|e| format!("file {n}: {e}"))?;
    }
    let share = outside("/usr/share");
    let mut documents = Vec::new();
    walk(&share.join("doc"), &mut documents);
    let (path, text) = match kind {
        "nginx" => (format!("{STATE}/nginx.conf"), nginx(&www)),
        _ => (format!("{STATE}/lighttpd.conf"), lighttpd(&www)),
    };
    fs::write(outside(&path), text).map_err(|e| format!("{path}: {e}"))?;
    let mut command = match kind {
        "nginx" => {
            let mut c = place::command("/usr/sbin/nginx")?;
            c.args(["-e", "stderr", "-c", &path]);
            c
        }
        _ => {
            let mut c = place::command("/usr/sbin/lighttpd")?;
            c.args(["-D", "-f", &path]);
            c
        }
    };
    let mut daemon = Daemon::start(&mut command)?;
    daemon.until(|| Wire::connect(PORT).map(drop))?;
    Ok((daemon, Box::new(Web { content, files, documents })))
}

fn nginx(www: &str) -> String {
    let mut text = format!(
        "daemon off;\nworker_processes 1;\npid {STATE}/pid;\nevents {{ worker_connections 64; }}\n\
         http {{\naccess_log off;\ndefault_type text/plain;\nsendfile on;\n"
    );
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        text += &format!("{kind}_temp_path {STATE}/{kind};\n");
    }
    text + &format!(
        "server {{\nlisten 127.0.0.1:{PORT};\nlocation / {{ root {www}; }}\n\
         location /share/ {{ alias /usr/share/; }}\n}}\n}}\n"
    )
}

fn lighttpd(www: &str) -> String {
    format!(
        "server.modules = (\"mod_alias\")\nserver.document-root = \"{www}\"\n\
         server.bind = \"127.0.0.1\"\nserver.port = {PORT}\nserver.upload-dirs = (\"{STATE}\")\n\
         alias.url = (\"/share/\" => \"/usr/share/\")\n"
    )
}

/// Plain files with plain names, in a fixed order.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name();
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let Ok(kind) = entry.file_type() else { continue };
        if !name.as_encoded_bytes().iter().all(|b| plain(*b)) {
            continue;
        }
        if kind.is_dir() {
            walk(&entry.path(), found);
        } else if kind.is_file()
            && entry.metadata().is_ok_and(|m| (1..=LARGEST_DOCUMENT).contains(&m.len()))
        {
            found.push(entry.path());
        }
    }
}

impl Load for Web {
    fn step(&mut self, random: &mut Random) -> Result<u64, String> {
        if !self.documents.is_empty() && random.below(DOCUMENTS) == 0 {
            let document = &self.documents[random.below(self.documents.len() as u64) as usize];
            let name = document.strip_prefix(outside("/usr/share")).map_err(|e| e.to_string())?;
            let want = fs::read(document).map_err(|e| format!("{}: {e}", document.display()))?;
            let path = format!("/share/{}", name.display());
            return same(&path, &get(&path)?, &want).map(|()| 1);
        }
        let file = random.below(self.files);
        let path = format!("/{file}");
        same(&path, &get(&path)?, &self.content.text(file, 0, FILE)).map(|()| 1)
    }
}

/// The body, by HTTP/1.0: the header tells its length.
fn get(path: &str) -> Result<Vec<u8>, String> {
    let mut wire = Wire::connect(PORT)?;
    wire.send(&[b"GET ", path.as_bytes(), b" HTTP/1.0\r\nHost: localhost\r\n\r\n"])?;
    let status = wire.line()?;
    if !status.contains(" 200 ") {
        return Err(format!("{path}: {status}"));
    }
    let mut length = None;
    loop {
        let line = wire.line()?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok();
        }
    }
    wire.bytes(length.ok_or(format!("{path}: no length"))?)
}
