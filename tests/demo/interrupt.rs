//! Ctrl-C: remove everything, then end.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use weft_tests::remove_group;

use crate::GROUP;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT, SIGTERM and SIGHUP end the demo and leave nothing behind.
pub(crate) fn watch() -> Result<()> {
    // Not blocked, or all that the demo starts would ignore them, too.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("listening for signals")?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        INTERRUPTED.store(true, Ordering::SeqCst);
        remove_group(GROUP);
        let name = signal_name(signal).unwrap_or("a signal");
        eprintln!("\ninterrupted ({name}); everything is removed");
        exit(130);
    });
    Ok(())
}

/// Does not return if the demo has been interrupted: whatever fails then fails because of that.
pub(crate) fn give_way() {
    std::thread::sleep(Duration::from_millis(50));
    while INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
}
