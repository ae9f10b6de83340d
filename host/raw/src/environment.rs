//! Variables that drivers read, set before anything else runs.

/// Sets an environment variable of this process if no thread but the caller's exists, which only Linux tells; says whether
/// it did.
///
/// For the first line of a program's `main`: a driver's layer that is set by a variable reads it in the process, not in a call.
pub fn set_while_alone(name: &str, value: &str) -> bool {
    let alone = cfg!(target_os = "linux") && std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        // SAFETY: no other thread exists that could read or write the environment meanwhile, and none can be made by
        // anyone but this one.
        unsafe { std::env::set_var(name, value) };
    }
    alone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_another_thread_nothing_is_set() {
        // The test harness is one, and this another for certain.
        std::thread::scope(|scope| {
            let (done, wait) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || wait.recv());
            assert!(!set_while_alone("KVMIG_RAW_TEST", "1"));
            assert!(std::env::var_os("KVMIG_RAW_TEST").is_none());
            drop(done);
        });
    }
}
