//! Which crate may depend on which.
//!
//! Owns: the table of allowed edges. A new edge edits this table in its own commit.
//! **Invariant:** dependencies point downwards only; dev- and build-dependencies count too.

use cargo_metadata::Package;

use crate::workspace::Workspace;

/// Package, and the workspace packages it may depend on.
const LAYERS: &[(&str, &[&str])] = &[
    ("ucm-failpoint", &[]),
    ("ucm-ctrl", &["ucm-failpoint"]),
    ("ucm-data", &["ucm-failpoint"]),
    ("ucm-fake-gpu", &[]),
    // The fake driver for tests only.
    ("ucm-transport", &["ucm-data", "ucm-fake-gpu"]),
    ("ucm-store", &["ucm-failpoint"]),
    ("ucm-queue", &["ucm-failpoint", "ucm-ctrl", "ucm-data", "ucm-transport", "ucm-store"]),
    ("ucm-remote", &["ucm-data", "ucm-transport", "ucm-store"]),
    ("ucm", &["ucm-ctrl", "ucm-data", "ucm-transport", "ucm-store", "ucm-queue", "ucm-remote"]),
    (
        "ucm-bench",
        &["ucm-ctrl", "ucm-data", "ucm-transport", "ucm-store", "ucm-queue", "ucm-remote", "ucm"],
    ),
    ("xtask", &[]),
];

/// Async runtimes, which have no place below `ucm-remote`.
const RUNTIMES: &[&str] = &["tokio", "async-std", "smol", "monoio", "glommio", "compio"];
const MAY_RUN_ASYNC: &[&str] = &["ucm-remote", "ucm", "ucm-bench"];
/// Those that may have one behind a feature, inside one backend.
const MAY_BEHIND_A_FEATURE: &[&str] = &["ucm-store"];

/// Compares `cargo metadata` with the table.
pub(super) fn check(workspace: &Workspace) -> Vec<String> {
    let packages = workspace.packages();
    let names: Vec<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut problems: Vec<String> =
        packages.iter().flat_map(|package| check_package(package, &names)).collect();
    for (name, _) in LAYERS {
        if !names.contains(name) {
            problems.push(format!("layers: {name} is in the table but not in the workspace"));
        }
    }
    problems
}

fn check_package(package: &Package, names: &[&str]) -> Vec<String> {
    let name = package.name.as_str();
    let counts = |dependency: &&cargo_metadata::Dependency| {
        let excused = dependency.optional && MAY_BEHIND_A_FEATURE.contains(&name);
        !(excused && RUNTIMES.contains(&dependency.name.as_str()))
    };
    let dependencies: Vec<&str> =
        package.dependencies.iter().filter(counts).map(|d| d.name.as_str()).collect();
    check_edges(name, &dependencies, names)
}

fn check_edges(name: &str, dependencies: &[&str], workspace: &[&str]) -> Vec<String> {
    let Some((_, allowed)) = LAYERS.iter().find(|(package, _)| *package == name) else {
        return vec![format!(
            "layers: {name} has no line in the table of xtask/src/tidy/layers.rs"
        )];
    };
    let mut problems = Vec::new();
    for dependency in dependencies {
        // A package may test its own features by depending on itself.
        let ours = workspace.contains(dependency) && *dependency != name;
        if ours && !allowed.contains(dependency) {
            problems.push(format!("layers: {name} must not depend on {dependency}"));
        }
        if RUNTIMES.contains(dependency) && !MAY_RUN_ASYNC.contains(&name) {
            problems.push(format!("layers: {name} must not depend on the runtime {dependency}"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::{LAYERS, check_edges};

    #[test]
    fn forbidden_edges_are_found() {
        let names: Vec<&str> = LAYERS.iter().map(|(name, _)| *name).collect();
        let check = |name, dependencies: &[&str]| check_edges(name, dependencies, &names).len();
        assert_eq!(check("ucm-ctrl", &["blake3", "ucm-data"]), 1);
        assert_eq!(check("ucm-transport", &["ucm-data", "ucm-ctrl"]), 1);
        assert_eq!(check("ucm-store", &["ucm-transport", "ucm-queue"]), 2);
        assert_eq!(check("ucm-queue", &["ucm-ctrl", "ucm-data", "ucm-transport", "ucm-store"]), 0);
        assert_eq!(check("xtask", &["ucm"]), 1);
        assert_eq!(check("ucm-queue", &["tokio"]), 1);
        assert_eq!(check("ucm-new", &[]), 1);
    }

    #[test]
    fn table_points_downwards_only() {
        for (at, (name, allowed)) in LAYERS.iter().enumerate() {
            for below in *allowed {
                let place = LAYERS.iter().position(|(other, _)| other == below);
                assert!(place.is_some_and(|place| place < at), "{name} -> {below}");
            }
        }
    }
}
