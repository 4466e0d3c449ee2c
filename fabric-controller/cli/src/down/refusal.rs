//! Refusal of packets to peers that an earlier `weft down` left, as something still sent to them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use fabric_supervisor::rundir::REFUSAL_FILE;

use crate::output::say;

/// Returns whether this network namespace has the nftables table of refused prefixes.
pub(super) fn is_in_force() -> bool {
    let mut nft = Command::new("nft");
    nft.args(["list", "table", "inet", "weft_refused"]);
    nft.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    nft.status().is_ok_and(|status| status.success())
}

/// Returns the copies of the table that the next start of the host would load.
pub(crate) fn saved(state_dirs: &[PathBuf]) -> Vec<PathBuf> {
    let files = state_dirs.iter().map(|state| state.join(REFUSAL_FILE));
    files.filter(|file| file.exists()).collect()
}

/// Refuses the prefixes of such a copy.
pub(crate) fn load(file: &Path) -> anyhow::Result<()> {
    let loaded = Command::new("nft").arg("-f").arg(file).output();
    let loaded = loaded.with_context(|| format!("cannot run nft for {}", file.display()))?;
    let errors = String::from_utf8_lossy(&loaded.stderr);
    anyhow::ensure!(loaded.status.success(), "nft -f {}: {}", file.display(), errors.trim());
    Ok(())
}

/// Removes a copy of the table, if there is one.
pub(super) fn remove(file: &Path) -> anyhow::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| {
            let file = file.display();
            format!("cannot remove {file}, which the next start of the host loads: remove it")
        }),
    }
}

/// Reports that the table is gone, and its copies, which `route-agent cleanup` may have removed.
pub(super) fn end(was_in_force: bool, saved: &[PathBuf]) {
    if was_in_force {
        say("removed the nftables table `inet weft_refused`, which refused packets to peers");
    }
    for file in saved {
        let _ = fs::remove_file(file);
        if !file.exists() {
            say(&format!(
                "removed {}, which the next start of the host would have loaded",
                file.display()
            ));
            // An agent has nothing else there; other state directories are not empty.
            let _ = file.parent().map(fs::remove_dir);
        }
    }
}
