//! Settings of the probes of gateways: the three switches of Liqo's gateway, by their names.

use std::time::Duration;

use clap::{ArgAction, builder::RangedU64ValueParser};
use fabric_api::fabric::ProbeSettings;
use jiff::SignedDuration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct ProbeArgs {
    /// Probe the gateways of peers. Without it, as a peer needs that is neither Liqo nor weft, a
    /// peering is connected while authentic packets arrive.
    #[arg(
        long,
        value_name = "BOOL",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        default_value_t = true
    )]
    ping_enabled: bool,
    /// Time between two probes, 100ms to 10s.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    ping_interval: Duration,
    /// How many unanswered probes make a peering lost, 1 to 100.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = RangedU64ValueParser::<u32>::new().range(1..=100)
    )]
    ping_loss_threshold: u32,
}

impl ProbeArgs {
    pub fn settings(&self) -> ProbeSettings {
        ProbeSettings {
            enabled: self.ping_enabled,
            interval_ms: u32::try_from(self.ping_interval.as_millis()).unwrap_or(u32::MAX),
            loss_threshold: self.ping_loss_threshold,
        }
    }

    /// The equivalent command line.
    pub fn to_args(self) -> [String; 3] {
        let ProbeSettings { enabled, interval_ms, loss_threshold } = self.settings();
        [
            format!("--ping-enabled={enabled}"),
            format!("--ping-interval={interval_ms}ms"),
            format!("--ping-loss-threshold={loss_threshold}"),
        ]
    }
}

impl Default for ProbeArgs {
    fn default() -> Self {
        let ProbeSettings { enabled, interval_ms, loss_threshold } = ProbeSettings::default();
        Self {
            ping_enabled: enabled,
            ping_interval: Duration::from_millis(interval_ms.into()),
            ping_loss_threshold: loss_threshold,
        }
    }
}

/// Parses a duration as Go writes it: `2s`, `500ms`, `1m30s`.
fn interval(text: &str) -> Result<Duration, String> {
    let unfit = || "expected a time from 100ms to 10s".to_owned();
    let parsed: SignedDuration = text.parse().map_err(|_| unfit())?;
    let interval = Duration::try_from(parsed).map_err(|_| unfit())?;
    let allowed = Duration::from_millis(100)..=Duration::from_secs(10);
    allowed.contains(&interval).then_some(interval).ok_or_else(unfit)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        probe: ProbeArgs,
    }

    fn parse(args: &[&str]) -> Result<ProbeArgs, clap::Error> {
        Ok(Line::try_parse_from(std::iter::once(&"x").chain(args))?.probe)
    }

    #[test]
    fn defaults_are_those_of_liqo() {
        assert_eq!(parse(&[]).unwrap().settings(), ProbeSettings::default());
        assert_eq!(parse(&[]).unwrap(), ProbeArgs::default());
    }

    #[test]
    fn switches_are_passed_on_in_spelling_of_go() {
        let line = ["--ping-enabled=false", "--ping-interval", "1500ms", "--ping-loss-threshold=3"];
        let args = parse(&line).unwrap();
        let expected = ProbeSettings { enabled: false, interval_ms: 1500, loss_threshold: 3 };
        assert_eq!(args.settings(), expected);
        let again = args.to_args();
        assert_eq!(parse(&again.each_ref().map(String::as_str)).unwrap(), args);
        assert!(parse(&["--ping-enabled"]).unwrap().ping_enabled);
    }

    #[test]
    fn probe_settings_out_of_range_are_refused() {
        for bad in ["99ms", "11s", "2", "-2s", ""] {
            assert!(parse(&["--ping-interval", bad]).is_err(), "{bad:?}");
        }
        for bad in ["0", "101", "x"] {
            assert!(parse(&["--ping-loss-threshold", bad]).is_err(), "{bad:?}");
        }
    }
}
