use std::process::ExitCode;

use super::output;

/// Print a shell's completion script.
///
/// For bash: weft completion bash > /etc/bash_completion.d/weft
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    shell: clap_complete::Shell,
}

/// `command` is the whole command line.
pub(crate) fn run(args: &CompletionArgs, mut command: clap::Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "weft", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
