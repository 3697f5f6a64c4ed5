//! Integration tests of the queue, through its public API and the real cache, engine and thread.

#![expect(clippy::unwrap_used, reason = "a failure in a test is a failed test")]

mod support;

mod bounded;
mod cancel;
mod crash;
mod dump;
mod failure;
mod group;
mod idle;
mod layers;
mod load;
mod poison;
mod predecessor;
mod random;
mod ranks;
mod refuse;
mod rotation;
mod staging;
