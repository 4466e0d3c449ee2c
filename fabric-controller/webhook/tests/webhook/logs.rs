//! Everything that anything in this process logs, to look for keys in it.

use std::io::{self, Write};
use std::sync::{Mutex, OnceLock};

use tracing_subscriber::filter::LevelFilter;

static ALL: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Keep;

impl Write for Keep {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        ALL.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn keep() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        let logs = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_ansi(false);
        logs.with_writer(|| Keep).init();
    });
}

pub(crate) fn all() -> String {
    String::from_utf8_lossy(&ALL.lock().unwrap()).into_owned()
}
