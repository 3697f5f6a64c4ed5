//! Tests of the whole crate in one process, by subject. Case ids stand in the names.
//!
//! **Invariant:** a test that cannot fail is not here: see the list of mutants in
//! [`loom_tests`](crate) and [`stress`].

mod drain;
mod joining;
mod kit;
mod lease;
mod model;
mod prealloc;

mod reap;
mod roles;
mod scenarios;
mod stress;
mod waiting;
