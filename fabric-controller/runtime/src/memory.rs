//! Memory of the process.

/// Returns what is allocated no more to the system. The allocator of glibc does so by itself only at the
/// end of the heap, which one long-lived allocation keeps where it is. Takes a few milliseconds.
pub fn return_unused_memory() {
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    // SAFETY: thread-safe, and what is allocated stays as it is: malloc_trim(3).
    unsafe {
        libc::malloc_trim(0);
    }
}
