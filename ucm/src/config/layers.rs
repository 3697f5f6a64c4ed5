//! Merging of the sources of settings.
//!
//! **Invariant:** every value keeps its source until it was accepted, so that an error can name it.

use std::path::Path;

use toml::{Table, Value};

use super::Config;
use crate::Error;

const PREFIX: &str = "UCM__";

pub(super) fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    overrides: &[String],
) -> Result<Config, Error> {
    let mut table = match file {
        None => Table::new(),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|source| {
                Error::os(format!("read the configuration file {}", path.display()), source)
            })?;
            let parsed = text
                .parse::<Table>()
                .map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
            // Judged alone first, so that the message names the file.
            accept(parsed.clone())
                .map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
            parsed
        }
    };
    let mut variables: Vec<_> =
        environment.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    variables.sort();
    for (name, value) in variables {
        let path: Vec<String> =
            name.trim_start_matches(PREFIX).split("__").map(str::to_ascii_lowercase).collect();
        set(&mut table, &path, &value)
            .map_err(|e| Error::Config(format!("environment variable {name}: {e}")))?;
        accept(table.clone())
            .map_err(|e| Error::Config(format!("environment variable {name}: {e}")))?;
    }
    for setting in overrides {
        let Some((path, value)) = setting.split_once('=') else {
            return Err(Error::Config(format!("{setting:?} is not of the form section.key=value")));
        };
        let path: Vec<String> = path.trim().split('.').map(str::to_owned).collect();
        set(&mut table, &path, value.trim())
            .map_err(|e| Error::Config(format!("setting {setting:?}: {e}")))?;
        accept(table.clone()).map_err(|e| Error::Config(format!("setting {setting:?}: {e}")))?;
    }
    accept(table).map_err(Error::Config)
}

fn accept(table: Table) -> Result<Config, String> {
    Value::Table(table).try_into::<Config>().map_err(|error| error.to_string().trim().to_owned())
}

/// Sets `section.key` or `pool.N.key`. The value is TOML, or else a plain string.
fn set(table: &mut Table, path: &[String], text: &str) -> Result<(), String> {
    let value = format!("v = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut parsed| parsed.remove("v"))
        .unwrap_or_else(|| Value::String(text.to_owned()));
    let unknown =
        || Err(format!("there is no setting {:?}: use section.key, or pool.N.key", path.join(".")));
    match path {
        [section, index, key] if section == "pool" => {
            let Ok(index) = index.parse::<usize>() else { return unknown() };
            let pools = table.entry("pool").or_insert_with(|| Value::Array(Vec::new()));
            let Value::Array(pools) = pools else { return unknown() };
            if index > pools.len() || index >= ucm_ctrl::MAX_POOLS {
                return Err(format!(
                    "there are {} pools: pool.{index} can be set when it is the next one",
                    pools.len()
                ));
            }
            if index == pools.len() {
                pools.push(Value::Table(Table::new()));
            }
            match pools.get_mut(index) {
                Some(Value::Table(pool)) => {
                    pool.insert(key.clone(), value);
                    Ok(())
                }
                _ => unknown(),
            }
        }
        [section, key] => {
            let section =
                table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(section) = section else { return unknown() };
            section.insert(key.clone(), value);
            Ok(())
        }
        _ => unknown(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Vec<(String, String)> {
        Vec::new()
    }

    fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ucm.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    /// A52: the order of precedence is file < environment < flags.
    #[test]
    fn a52_later_sources_win() {
        let (_dir, path) =
            file("[cache]\nranks = 2\nname = \"file\"\n[[pool]]\nshard_bytes = 4096\nslots = 10\n");
        let env = vec![
            ("UCM__CACHE__RANKS".to_owned(), "3".to_owned()),
            ("UCM__QUEUE__DUMP_DEPTH".to_owned(), "9".to_owned()),
            ("OTHER".to_owned(), "x".to_owned()),
        ];
        let flags = vec![
            "cache.ranks=4".to_owned(),
            "pool.0.slots=20".to_owned(),
            "pool.1.shard_bytes=64".to_owned(),
        ];
        let config = load(Some(&path), env, &flags).unwrap();
        assert_eq!(
            (config.cache.ranks, config.cache.name.as_str(), config.queue.dump_depth),
            (4, "file", 9)
        );
        assert_eq!(
            (config.pool[0].slots, config.pool[0].shard_bytes, config.pool[1].shard_bytes),
            (20, 4096, 64)
        );
        // What is in force can be printed and read back.
        let printed = config.to_toml().unwrap();
        let (_dir, path) = file(&printed);
        assert_eq!(load(Some(&path), none(), &[]).unwrap(), config);
    }

    /// A52: misspelt key, right key in the wrong section, wrong type, unknown value: each stops
    /// the start and is named with its source.
    #[test]
    fn a52_unknown_settings_stop_the_start() {
        for (text, named) in [
            ("[cache]\nrank = 2\n", "rank"),
            ("[queue]\nranks = 2\n", "ranks"),
            ("[cach]\nranks = 2\n", "cach"),
            ("[cache]\nranks = \"two\"\n", "two"),
            ("[cache]\npages = \"3m\"\n", "3m"),
            ("[cache]\nranks = -1\n", "-1"),
            ("[cache]\nranks = 4294967296\n", "4294967296"),
        ] {
            let (_dir, path) = file(text);
            let error = load(Some(&path), none(), &[]).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("ucm.toml"), "{error}");
        }
        let env = vec![("UCM__CACHE__RANK".to_owned(), "3".to_owned())];
        let error = load(None, env, &[]).unwrap_err().to_string();
        assert!(error.contains("UCM__CACHE__RANK") && error.contains("rank"), "{error}");
        for flag in [
            "cache.rank=1",
            "ranks=1",
            "cache.ranks",
            "pool.x.slots=1",
            "pool.5.slots=1",
            "a.b.c.d=1",
        ] {
            let error = load(None, none(), &[flag.to_owned()]).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
    }

    #[test]
    fn text_values_need_no_quotes() {
        let config =
            load(None, none(), &["cache.dir=/tmp/x y".to_owned(), "cache.pages=4k".to_owned()])
                .unwrap();
        assert_eq!(config.cache.dir, Path::new("/tmp/x y"));
        assert_eq!(config.cache.pages, super::super::Pages::Small);
    }

    #[test]
    fn wrong_numbers_are_named_by_check() {
        let pool = "pool.0.shard_bytes=100".to_owned();
        for (flags, named) in [
            (vec![], "[[pool]]"),
            (vec![pool.clone()], "slots is 0"),
            (vec![pool.clone(), "pool.0.slots=1".into(), "cache.ranks=0".into()], "cache.ranks"),
            (
                vec![pool.clone(), "pool.0.slots=1".into(), "backend.kind=file".into()],
                "backend.dir",
            ),
            (vec![pool, "pool.0.slots=1".into(), "cache.name=a/b".into()], "cache.name"),
        ] {
            let error = load(None, none(), &flags).unwrap().check().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
