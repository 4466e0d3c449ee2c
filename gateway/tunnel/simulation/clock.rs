//! A manual clock for each thread.
//!
//! boringtun asks the system for the time, for its timers and for the stamps of its initiations.
//! `clock_gettime` is defined here, so that what is simulated is the code that is shipped: the
//! linker takes the first definition it sees, and libc's comes last.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Start of every clock in a simulation, the wall clock included.
const START: Duration = Duration::from_secs(1_800_000_000);

thread_local! {
    static NOW: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Sets this thread's clocks to so many microseconds after the start.
pub(crate) fn set(micros: u64) -> Instant {
    NOW.set(Some(START + Duration::from_micros(micros)));
    #[expect(clippy::disallowed_methods, reason = "this is the clock that was just set")]
    Instant::now()
}

/// Gives this thread the system's clocks back.
pub(crate) fn release() {
    NOW.set(None);
}

/// As in POSIX.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    let Some(now) = NOW.get() else {
        // SAFETY: the kernel checks both arguments, and `time` is the caller's.
        return unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as libc::c_int;
    };
    let value = libc::timespec {
        tv_sec: now.as_secs() as libc::time_t,
        tv_nsec: now.subsec_nanos().into(),
    };
    // SAFETY: POSIX wants the caller to pass a valid pointer.
    unsafe { time.write(value) };
    0
}
