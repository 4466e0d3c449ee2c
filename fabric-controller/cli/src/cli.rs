use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use super::{adopt, agent, completion, down, example, get, init, keys, logs, output, status, up};

const EXAMPLES: &str = "\
Examples:
  Describe this cluster, then run its fabric on this host:
    weft init --cluster-id rome --pod-cidr 10.200.0.0/16 --out /etc/weft/rome
    weft up --manifests /etc/weft/rome
  Make the keys of a peering; the public half goes to the other cluster:
    weft keys --cluster-id rome --peer milan --out .
  Begin the manifest of that peering, for the side that has a GatewayClient:
    weft example client > /etc/weft/rome/milan.yaml
  Look at it, and take it away again:
    weft status --watch
    weft get gatewayserver -o yaml
    weft logs -f
    weft down

Exit codes: 0 done, 1 it failed, 2 wrong usage; `weft status` has more (see its --help).";

/// Joins the pod networks of clusters over WireGuard, on plain hosts.
///
/// A cluster is a directory of manifests: Liqo's custom resources, Nodes and a ConfigMap with the
/// cluster's ID. `weft up` runs it; changes to the files take effect within a second.
#[derive(Debug, Parser)]
#[command(name = "weft", version, after_long_help = EXAMPLES, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Init(init::InitArgs),
    Up(up::UpArgs),
    Agent(agent::AgentArgs),
    Status(status::StatusArgs),
    Get(get::GetArgs),
    Keys(keys::KeysArgs),
    Example(example::ExampleArgs),
    Logs(logs::LogsArgs),
    Down(down::DownArgs),
    Adopt(adopt::AdoptArgs),
    Completion(completion::CompletionArgs),
}

/// Name by which kubectl finds this program as its plugin.
const PLUGIN: &str = "kubectl-weft";

/// Exits with the usage if the arguments are wrong.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Cli {
    let args: Vec<_> = args.collect();
    let program = args.first().map(OsString::as_os_str).unwrap_or_default();
    let matches = command(program).get_matches_from(&args);
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// The command line of the program that is called so.
fn command(program: &OsStr) -> clap::Command {
    let command = Cli::command();
    if Path::new(program).file_name() != Some(OsStr::new(PLUGIN)) {
        return command;
    }
    let examples = EXAMPLES.replace("weft ", "kubectl weft ");
    command.bin_name("kubectl weft").after_help(examples.clone()).after_long_help(examples)
}

pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Init(args) => init::run(&args),
        Command::Up(args) => up::run(&args),
        Command::Agent(args) => agent::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Get(args) => get::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Example(args) => example::run(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Down(args) => down::run(&args),
        Command::Adopt(args) => adopt::run(&args),
        Command::Completion(args) => completion::run(&args, Cli::command()),
    }
}

/// Prints an error with its causes, once. A reader of our output that left early is none.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.downcast_ref::<output::Closed>().is_some() {
        return ExitCode::SUCCESS;
    }
    output::say(&format!("error: {error:#}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At most this many characters a line: clap breaks longer ones after one word of the next.
    const WIDTH: usize = 100;

    #[test]
    fn plugin_is_called_kubectl_weft_in_usage() {
        let help = |program: &str| {
            let error =
                command(program.as_ref()).try_get_matches_from([program, "status", "--help"]);
            error.unwrap_err().to_string()
        };
        assert!(help("/usr/local/bin/kubectl-weft").contains("Usage: kubectl weft status"));
        assert!(help("/usr/local/bin/weft").contains("Usage: weft status"));
        let mut plugin = command("kubectl-weft".as_ref());
        assert!(plugin.render_long_help().to_string().contains("    kubectl weft status --watch"));
    }

    #[test]
    fn no_line_of_a_help_text_is_broken_twice() {
        for command in Cli::command().get_subcommands() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > WIDTH).collect();
            assert!(wide.is_empty(), "weft {}: {wide:#?}", command.get_name());
        }
    }
}
