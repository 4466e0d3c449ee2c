use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const PAUSE: Duration = Duration::from_millis(15);

/// Calls `check` repeatedly until it succeeds. An error names what was waited for and why it
/// was not so at the last try.
pub fn wait_until<T, E: Display>(
    what: &str,
    at_most: Duration,
    mut check: impl FnMut() -> Result<T, E>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let reason = match check() {
            Ok(answer) => return Ok(answer),
            Err(reason) => reason,
        };
        if start.elapsed() > at_most {
            bail!("waited {at_most:?} until {what}, but {reason:#}");
        }
        std::thread::sleep(PAUSE);
    }
}

/// Calls `check` repeatedly for a while; fails as soon as that does.
pub fn stays_so<E: Display>(
    what: &str,
    for_long: Duration,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < for_long {
        if let Err(reason) = check() {
            bail!(
                "{what} was to stay so for {for_long:?}, but after {:?} {reason:#}",
                start.elapsed()
            );
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
