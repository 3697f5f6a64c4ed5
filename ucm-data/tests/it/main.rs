//! Integration tests in one process, public API only.

mod registration;
mod segments;
