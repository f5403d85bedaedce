#![forbid(unsafe_code)]
//! Placeholder until the first module lands.
