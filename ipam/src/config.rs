use std::time::Duration;

use clap::Parser;
use fabric_api::Cidr;
use fabric_runtime::{HttpAddress, LogArgs};
use fabric_store::StoreArgs;
use ipam_proto::Address;

/// Keeps account of which prefixes and addresses of this cluster are taken.
///
/// ipam serves Liqo's gRPC service IPAM and the standard gRPC health service. It has no storage of
/// its own: at start it reads from the statuses of all Networks and IPs what is taken, and looks
/// again every --sync-interval, so a restart grants nothing twice. What it has granted a moment ago
/// is in a note: the ConfigMap weft-ipam-open-grants of its namespace, or a file in STATE_DIR. In
/// Kubernetes, any number of replicas may answer: one that does not know what another has noted
/// reads all of it before it grants.
///
/// A prefix that may be remapped is granted as asked if it is free, otherwise as the first free
/// prefix of the same length, next to what is taken already: 10.70.0.0/16 becomes 10.71.0.0/16. A
/// prefix outside of the pools that may be remapped always moves into a pool. One that must not be
/// remapped is granted as it is or refused.
///
/// IPv6 works alike. Its default pool fd00::/8 is all of the locally assigned unique local
/// addresses (RFC 4193): prefixes of such clusters keep their addresses unless two of them are the
/// same. Globally unique prefixes that may be remapped move there too; mark such a Network as not
/// remapped, or give a pool that holds it, to keep its addresses.
///
/// Health: service "IPAM" is SERVING once the state is read; service "IPAM/consistent" is
/// NOT_SERVING while two resources hold the same. Conflicts are logged by the names of both.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Where to listen: unix:PATH or IP:PORT.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:6000")]
    pub(crate) listen: Address,
    /// Refuse calls without a token of a service account of weft's namespace for the audience weft-ipam;
    /// one that is given is reviewed in any case. Liqo's own clients give none.
    #[arg(long)]
    pub(crate) require_token: bool,
    /// Address that serves /metrics, /healthz and /readyz: `unix:PATH` or `IP:PORT`.
    #[arg(long, value_name = "unix:PATH|IP:PORT")]
    pub(crate) http: Option<HttpAddress>,
    /// Prefixes to grant from, separated by commas, tried in this order; no two may overlap.
    #[arg(
        long,
        value_name = "CIDRS",
        value_delimiter = ',',
        default_value = "10.0.0.0/8,192.168.0.0/16,172.16.0.0/12,fd00::/8"
    )]
    pub(crate) pools: Vec<Cidr>,
    /// How often to compare with the store, such as 90s or 2m; 0s only at start.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = duration)]
    pub(crate) sync_interval: Duration,
    /// How long a grant or a release may take to reach the store before it counts as lost.
    #[arg(
        long,
        alias = "sync-graceperiod",
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration
    )]
    pub(crate) sync_grace_period: Duration,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

fn duration(text: &str) -> Result<Duration, String> {
    let signed: jiff::SignedDuration =
        text.parse().map_err(|_| "expected a time such as 30s or 2m".to_owned())?;
    signed.try_into().map_err(|_| "a time cannot be negative".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["ipam", "--run-dir", "/run/weft/rome"].iter().chain(args))
    }

    #[test]
    fn defaults_are_liqos_and_the_unique_local_addresses() {
        let args = parse(&[]).unwrap();
        let pools: Vec<_> = args.pools.iter().map(Cidr::to_string).collect();
        assert_eq!(pools, ["10.0.0.0/8", "192.168.0.0/16", "172.16.0.0/12", "fd00::/8"]);
        assert_eq!(args.sync_interval, Duration::from_secs(120));
        assert_eq!(args.sync_grace_period, Duration::from_secs(30));
    }

    #[test]
    fn liqos_spelling_of_the_grace_period_is_understood() {
        let args = parse(&["--sync-graceperiod", "1m30s", "--sync-interval", "0s"]).unwrap();
        assert_eq!(args.sync_grace_period, Duration::from_secs(90));
        assert_eq!(args.sync_interval, Duration::ZERO);
        assert!(parse(&["--sync-interval", "-2m"]).is_err());
        assert!(parse(&["--sync-interval", "often"]).is_err());
    }

    #[test]
    fn unmasked_pool_is_refused_with_correction() {
        let error = parse(&["--pools", "10.0.0.1/8"]).unwrap_err().to_string();
        assert!(error.contains("did you mean 10.0.0.0/8?"), "{error}");
    }
}
