//! Refusal of packets to peers that an earlier `weft down` left, as something still sent to them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use fabric_supervisor::rundir::REFUSAL_FILE;

use crate::output::say;

/// Returns whether this network namespace has the nftables table of refused prefixes.
pub(super) fn is_in_force() -> bool {
    let mut nft = Command::new("nft");
    nft.args(["list", "table", "inet", "weft_refused"]);
    nft.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    nft.status().is_ok_and(|status| status.success())
}

/// Reports that the table is gone, and removes its copies, which the next start of the host would load.
pub(super) fn end(was_in_force: bool, state_dirs: &[PathBuf]) {
    if was_in_force {
        say("removed the nftables table `inet weft_refused`, which refused packets to peers");
    }
    for state in state_dirs {
        let file = state.join(REFUSAL_FILE);
        // Not being there is no error.
        if fs::remove_file(&file).is_ok() {
            let file = file.display();
            say(&format!("removed {file}, which the next start of the host would have loaded"));
            // An agent has nothing else there; other state directories are not empty.
            let _ = fs::remove_dir(state);
        }
    }
}
