//! Output of the tool: results on stdout, everything else on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};

pub(crate) use fabric_supervisor::{printable, say};

use serde::Serialize;

/// Reader of the output is gone (`weft get all | head`).
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output any more")]
pub(crate) struct Closed;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    Yaml,
    Json,
}

/// Writes a result to stdout.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to standard output")),
    }
}

/// `A still sends` or `A, B still send`.
pub(crate) fn sending(senders: &[impl Display]) -> String {
    let names: Vec<_> = senders.iter().map(ToString::to_string).collect();
    format!("{} still {}", names.join(", "), if names.len() == 1 { "sends" } else { "send" })
}

/// Encodes a value as one document, newline included.
pub(crate) fn encode(value: &impl Serialize, format: Format) -> anyhow::Result<String> {
    match format {
        Format::Yaml => Ok(serde_saphyr::to_string(value)?),
        Format::Json => Ok(serde_json::to_string_pretty(value)? + "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sender_sends_and_two_send() {
        assert_eq!(sending(&["10.200.0.2"]), "10.200.0.2 still sends");
        assert_eq!(sending(&["10.200.0.2", "fd00::2"]), "10.200.0.2, fd00::2 still send");
    }
}
