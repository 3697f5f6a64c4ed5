//! A memory disk for Linux: a cpio archive in the "newc" format.
//!
//! **Invariant:** every file comes after the folders it lies in.

use std::collections::BTreeMap;

/// What is in the disk, by path without a leading slash.
#[derive(Debug, Default)]
pub(super) struct Archive(BTreeMap<String, Entry>);

#[derive(Debug)]
struct Entry {
    mode: u32,
    bytes: Vec<u8>,
}

impl Archive {
    /// A folder, with those it lies in.
    pub(super) fn folder(&mut self, path: &str) {
        let path = path.trim_matches('/');
        if path.is_empty() {
            return;
        }
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent);
        }
        self.0
            .entry(path.to_owned())
            .or_insert_with(|| Entry { mode: 0o040_755, bytes: Vec::new() });
    }

    /// A file that may be run.
    pub(super) fn file(&mut self, path: &str, bytes: Vec<u8>) {
        self.put(path, 0o100_755, bytes);
    }

    /// A symbolic link.
    pub(super) fn link(&mut self, path: &str, to: &str) {
        self.put(path, 0o120_777, to.as_bytes().to_vec());
    }

    pub(super) fn contains(&self, path: &str) -> bool {
        self.0.contains_key(path.trim_matches('/'))
    }

    fn put(&mut self, path: &str, mode: u32, bytes: Vec<u8>) {
        let path = path.trim_matches('/');
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent);
        }
        self.0.insert(path.to_owned(), Entry { mode, bytes });
    }

    /// The archive.
    pub(super) fn pack(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let last = Entry { mode: 0, bytes: Vec::new() };
        let all = self.0.iter().map(|(path, entry)| (path.as_str(), entry));
        for (number, (path, entry)) in all.chain([("TRAILER!!!", &last)]).enumerate() {
            let fields = [
                number + 1,
                entry.mode as usize,
                0,
                0,
                1,
                0,
                entry.bytes.len(),
                0,
                0,
                0,
                0,
                path.len() + 1,
                0,
            ];
            out.extend(b"070701");
            fields.iter().for_each(|field| out.extend(format!("{field:08x}").into_bytes()));
            out.extend(path.as_bytes());
            out.push(0);
            out.resize(out.len().next_multiple_of(4), 0);
            out.extend(&entry.bytes);
            out.resize(out.len().next_multiple_of(4), 0);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn entries_are_aligned_and_folders_come_first() {
        let mut archive = Archive::default();
        archive.file("/bin/a/tool", b"12345".to_vec());
        archive.link("bin/b", "a/tool");
        let packed = archive.pack();
        assert!(packed.len().is_multiple_of(4));
        let text = String::from_utf8_lossy(&packed);
        let names = ["bin\0", "bin/a\0", "bin/a/tool\0", "bin/b\0", "TRAILER!!!\0"];
        let places: Vec<usize> = names.iter().map(|name| text.find(name).unwrap()).collect();
        assert!(places.is_sorted(), "{places:?}");
        assert_eq!(text.matches("070701").count(), 5);
        assert!(archive.contains("/bin/b") && !archive.contains("bin/c"));
        // The head of the file: its number, its mode, and its length where they belong.
        let head = &text[places[2] - 110..places[2]];
        assert_eq!((&head[6..22], &head[54..62]), ("00000003000081ed", "00000005"));
    }
}
