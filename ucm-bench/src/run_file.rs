//! `run.json`: the documents of one run of the suite.
//!
//! Owns: its form, and reading and writing it.
//! **Invariant:** a file of a newer form is refused, never half understood.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{document::Document, error::BenchError};

/// What one run of the suite measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFile {
    schema_version: u32,
    documents: Vec<Document>,
}

impl RunFile {
    /// From the documents in the order they were made.
    pub fn new(documents: Vec<Document>) -> Self {
        Self { schema_version: Document::SCHEMA_VERSION, documents }
    }

    /// The documents in the order they were made.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Reads a run, or a single document (as `--json` prints it).
    ///
    /// # Errors
    /// The file cannot be read, is something else, or of another schema version.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let text = fs::read_to_string(path).map_err(|e| BenchError::path("read", path, e))?;
        let run = serde_json::from_str::<Self>(&text)
            .or_else(|error| {
                serde_json::from_str(&text).map(|one| Self::new(vec![one])).map_err(|_| error)
            })
            .map_err(|error| {
                BenchError::Usage(format!("{} is no run of ucm-bench: {error}", path.display()))
            })?;
        let versions = run.documents.iter().map(Document::schema_version);
        for version in versions.chain([run.schema_version]) {
            if version != Document::SCHEMA_VERSION {
                return Err(BenchError::Usage(format!(
                    "{} has schema version {version}, this program reads {}",
                    path.display(),
                    Document::SCHEMA_VERSION
                )));
            }
        }
        Ok(run)
    }

    /// Writes it.
    ///
    /// # Errors
    /// The folder or file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), BenchError> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| BenchError::path("create", folder, e))?;
        }
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| BenchError::io("cannot form JSON", error.into()))?;
        fs::write(path, text + "\n").map_err(|e| BenchError::path("write", path, e))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::RunFile;
    use crate::{document::Document, env::Env};

    #[test]
    fn runs_and_single_documents_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/run.json");
        let run = RunFile::new(vec![Document::new("load", Env::default())]);
        run.write(&path).unwrap();
        assert_eq!(RunFile::read(&path).unwrap(), run);
        fs::write(&path, serde_json::to_string(&run.documents()[0]).unwrap()).unwrap();
        assert_eq!(RunFile::read(&path).unwrap(), run);
    }

    #[test]
    fn other_files_and_versions_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        for text in ["", "{}", r#"{"schema_version":2,"documents":[]}"#] {
            fs::write(&path, text).unwrap();
            assert_eq!(RunFile::read(&path).unwrap_err().exit_code(), 2, "{text}");
        }
        assert_eq!(RunFile::read(&folder.path().join("none")).unwrap_err().exit_code(), 4);
    }
}
