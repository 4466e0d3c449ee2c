use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::{Cluster, Host};

/// Number of lines shown of each log.
const TAIL: usize = 25;

impl Cluster {
    /// Status, logs and kernel state, to find why something did not work.
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
        for (gateway, line) in self.counters() {
            let _ = writeln!(text, "{gateway}: {line}");
        }
        for node in &self.nodes {
            let _ = writeln!(text, "---- kernel of {}\n{}", node.host.name(), kernel(&node.host));
        }
        text
    }

    /// Packets that gateways were given for the peer so far, and those that they took out of the
    /// tunnel.
    pub fn tunnelled(&self) -> (u64, u64) {
        let (mut given, mut taken) = (0, 0);
        for (_, line) in self.counters() {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let value: u64 = value.parse().unwrap_or(0);
            let is_packets = name.starts_with("weft_gateway_packets_total");
            let is_dropped = name.starts_with("weft_gateway_dropped_packets_total");
            match name.contains("direction=\"outbound\"") {
                true if is_packets || is_dropped => given += value,
                false if is_packets => taken += value,
                true | false => {}
            }
        }
        (given, taken)
    }

    /// Counters of the gateways that are not zero.
    fn counters(&self) -> Vec<(String, String)> {
        let sockets = fs::read_dir(self.outside(format!("{}/http", self.run_dir())));
        let sockets = sockets.into_iter().flatten().flatten();
        sockets
            .flat_map(|entry| {
                let gateway = entry.file_name().to_string_lossy().into_owned();
                let metrics = connect(&entry.path()).and_then(scrape).unwrap_or_default();
                let counts =
                    |line: &&str| line.starts_with("weft_gateway") && !line.ends_with(" 0");
                let lines: Vec<_> = metrics.lines().filter(counts).map(str::to_owned).collect();
                lines.into_iter().map(move |line| (gateway.clone(), line))
            })
            .collect()
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

/// Metrics of a program, requested as Prometheus does.
pub fn scrape(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    Ok(stream)
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
