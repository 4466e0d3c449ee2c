use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::{Cluster, Host};

/// How many lines of each log are shown.
const TAIL: usize = 25;

impl Cluster {
    /// All that helps to see why something did not work: status, logs, kernel state.
    pub fn report(&self) -> String {
        let mut text = format!("==== {} ====\n", self.spec.id);
        let _ = match self.weft(&["status"]) {
            Ok(status) => writeln!(text, "{status}"),
            Err(error) => writeln!(text, "{error:#}"),
        };
        for (name, log) in self.logs() {
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(TAIL)..].join("\n");
            let _ = writeln!(text, "---- log of {name}\n{tail}");
        }
        for node in &self.nodes {
            let _ = writeln!(text, "---- kernel of {}\n{}", node.host.name(), kernel(&node.host));
        }
        text
    }

    /// Logs of everything that runs or ran, by name.
    pub fn logs(&self) -> Vec<(String, String)> {
        let mut dirs = vec!["/run/cluster".to_owned(), format!("{}/log", self.run_dir())];
        dirs.extend((2..=self.spec.nodes).map(|number| format!("/run/agent-{number}/log")));
        let mut logs: Vec<_> = dirs.iter().flat_map(|dir| read_logs(&self.outside(dir))).collect();
        logs.sort();
        logs
    }
}

fn read_logs(dir: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().extension().is_some_and(|ext| ext == "log"))
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            Some((name, fs::read_to_string(entry.path()).ok()?))
        })
        .collect()
}

fn kernel(host: &Host) -> String {
    let script = "ip -br address; ip rule; ip route show table 18952; ip -6 route show table 18952; \
                  ip neigh show nud permanent; bridge fdb show; nft list table inet weft | grep -B4 elements";
    let command = format!("({script}) 2>&1");
    host.command(Command::new("sh").args(["-c", &command]), "").unwrap_or_else(|e| format!("{e:#}"))
}
