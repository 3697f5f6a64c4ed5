//! Integration tests in one process, public API only.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod registration;
mod segments;
