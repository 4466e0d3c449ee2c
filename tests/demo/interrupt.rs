//! Ctrl-C: remove everything, then end.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use weft_tests::remove_group;

use crate::GROUP;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT, SIGTERM and SIGHUP end the demo and leave nothing behind.
pub(crate) fn watch() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block().context("blocking signals")?;
    std::thread::spawn(move || {
        let Ok(signal) = signals.wait() else { return };
        INTERRUPTED.store(true, Ordering::SeqCst);
        remove_group(GROUP);
        eprintln!("\ninterrupted ({signal}); everything is removed");
        exit(130);
    });
    Ok(())
}

/// Never returns if the demo has been interrupted: whatever fails then fails because of that.
pub(crate) fn give_way() {
    std::thread::sleep(Duration::from_millis(50));
    while INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
}
