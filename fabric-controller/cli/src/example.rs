use std::process::ExitCode;

use super::output;

/// Print the manifests of a peering, to be edited: Configuration, and GatewayClient or GatewayServer.
///
/// They are those of rome, the client, and of milan, its server; each goes into the manifests of its
/// cluster, besides the Secret and the PublicKey of `weft keys`. Replace the two IDs, the CIDRs and the
/// address.
#[derive(Debug, clap::Args)]
pub(crate) struct ExampleArgs {
    /// Side of the peering: the client connects, to the server's address.
    #[arg(value_enum)]
    side: Side,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Side {
    Client,
    Server,
}

pub(crate) fn run(args: &ExampleArgs) -> anyhow::Result<ExitCode> {
    output::print(match args.side {
        Side::Client => include_str!("../../../deploy/examples/rome.yaml"),
        Side::Server => include_str!("../../../deploy/examples/milan.yaml"),
    })?;
    Ok(ExitCode::SUCCESS)
}
