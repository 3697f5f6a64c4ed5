//! Servers that tests start themselves, installed where that is allowed.
//!
//! **Invariant:** nothing here fails a run: a test that finds no server skips itself and says why.

use crate::shell::{Shell, say};

/// Any of these programs, from this package.
const REDIS: ([&str; 2], &str) = (["redis-server", "valkey-server"], "redis-server");

/// Sees to it that a Redis or Valkey server is there: as root on a system with apt it is installed.
pub(crate) fn redis() {
    let (programs, package) = REDIS;
    let there = |program: &&str| Shell::program(program).args(&["--version"]).quiet().is_some();
    if programs.iter().any(there) || !is_root() {
        return;
    }
    say(&format!("installing {package} for the tests that need it"));
    let install = |arguments: &[&str]| {
        Shell::program("apt-get")
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .quiet()
            .is_some()
    };
    let get = ["install", "-y", "-q", "--no-install-recommends", package];
    // Lists may be missing or old on a fresh machine.
    let installed = install(&get) || install(&["update", "-q"]) && install(&get);
    if !installed {
        say(&format!("{package} cannot be installed here"));
    }
}

fn is_root() -> bool {
    Shell::program("id").args(&["-u"]).quiet().is_some_and(|id| id.trim() == "0")
}
