//! The `kvmig` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvmig::cli::main()
}
