//! Progress on a terminal, and elsewhere.

use std::io::{IsTerminal, Write, stdout};
use std::time::Instant;

/// A step that takes a moment: named when it begins, finished on the same line.
pub(crate) struct Step {
    name: &'static str,
    begun: Instant,
}

impl Step {
    pub(crate) fn begin(name: &'static str, what: &str) -> Self {
        if stdout().is_terminal() {
            print!("{name:<10} {what} ...");
            let _ = stdout().flush();
        } else {
            println!("{name:<10} {what}");
        }
        Self { name, begun: Instant::now() }
    }

    pub(crate) fn done(self, how: &str) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let restart = if stdout().is_terminal() { "\r\x1b[K" } else { "" };
        println!("{restart}{:<10} {how} ({seconds:.1} s)", self.name);
    }
}

/// Some lines that change: redrawn in place on a terminal, elsewhere a changed line is printed
/// again with the seconds since the first.
pub(crate) struct Board {
    begun: Instant,
    shown: Vec<String>,
    live: bool,
}

impl Board {
    pub(crate) fn new() -> Self {
        Self { begun: Instant::now(), shown: Vec::new(), live: stdout().is_terminal() }
    }

    pub(crate) fn show(&mut self, lines: Vec<String>) {
        if lines == self.shown {
            return;
        }
        if self.live {
            if !self.shown.is_empty() {
                print!("\x1b[{}A", self.shown.len());
            }
            for line in &lines {
                println!("\x1b[K{line}");
            }
        } else {
            let seconds = self.begun.elapsed().as_secs_f64();
            let changed = |(i, line): &(usize, &String)| self.shown.get(*i) != Some(*line);
            for (_, line) in lines.iter().enumerate().filter(changed) {
                println!("{seconds:5.2} s  {}", line.trim_start());
            }
        }
        self.shown = lines;
    }
}
