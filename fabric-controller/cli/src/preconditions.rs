//! Requirements on a host before anything is started, reported all at once.

use std::fs::{self, OpenOptions};
use std::io;
use std::process::{Command, Stdio};

use anyhow::bail;
use nix::sys::resource::{Resource, getrlimit};

/// linux/capability.h
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;

/// Open files of a process below which one of them fails while its peering is connected.
const MIN_OPEN_FILES: u64 = 64;

/// Fails with everything that is missing and what to do about it.
pub(crate) fn check(runs_gateways: bool) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    missing.extend(capabilities());
    missing.extend(if runs_gateways { tun() } else { None });
    missing.extend(nft());
    missing.extend(getrlimit(Resource::RLIMIT_NOFILE).ok().and_then(|(_, hard)| open_files(hard)));
    missing.extend(forwarding());
    match &missing[..] {
        [] => Ok(()),
        [one] => bail!("{one}"),
        many => bail!("this host is not ready:\n  - {}", many.join("\n  - ")),
    }
}

/// Fails unless this process may change networks and namespaces.
pub(crate) fn check_rights() -> anyhow::Result<()> {
    capabilities().map_or(Ok(()), |missing| Err(anyhow::anyhow!(missing)))
}

fn capabilities() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = effective(&status)?;
    let lacking: Vec<_> = [(CAP_NET_ADMIN, "CAP_NET_ADMIN"), (CAP_SYS_ADMIN, "CAP_SYS_ADMIN")]
        .into_iter()
        .filter(|(bit, _)| mask & (1 << bit) == 0)
        .map(|(_, name)| name)
        .collect();
    (!lacking.is_empty()).then(|| {
        format!(
            "weft lacks {}, which it needs to make devices, routes and namespaces; run it as root",
            lacking.join(" and ")
        )
    })
}

fn effective(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn tun() -> Option<String> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    opened.err().map(|error| {
        format!(
            "cannot open /dev/net/tun ({error}), through which gateways get their packets; load \
             the module with `modprobe tun`, or give the container that device"
        )
    })
}

fn nft() -> Option<String> {
    let run = Command::new("nft")
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match run {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("`nft --version` failed ({status}); reinstall nftables")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(
            "the program `nft` is not in PATH; install nftables (apt-get install nftables)"
                .to_owned(),
        ),
        Err(error) => Some(format!("cannot run `nft --version`: {error}")),
    }
}

fn open_files(hard: u64) -> Option<String> {
    (hard < MIN_OPEN_FILES).then(|| {
        format!(
            "the hard limit of open files is {hard}, expected {MIN_OPEN_FILES} at least, and 4 for each \
             gateway; raise it (`ulimit -n 1024` as root, LimitNOFILE= in a unit)"
        )
    })
}

fn forwarding() -> Option<String> {
    let path = "/proc/sys/net/ipv4/ip_forward";
    let found = fs::read_to_string(path).unwrap_or_else(|error| error.to_string());
    (found.trim() != "1").then(|| {
        format!(
            "{path} is {:?}, expected 1: this host forwards nothing between pods and gateways; \
             run `sysctl -w net.ipv4.ip_forward=1` (and keep it with a file in /etc/sysctl.d)",
            found.trim()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_open_files_are_named_with_a_remedy() {
        assert_eq!(open_files(64), None);
        assert!(open_files(32).unwrap().contains("is 32, expected 64"));
    }

    #[test]
    fn capabilities_are_read_from_proc_status() {
        let status = "Name:\tweft\nCapPrm:\t0\nCapEff:\t0000000000201000\nCapBnd:\t0\n";
        assert_eq!(effective(status), Some(1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN));
        assert_eq!(effective("Name:\tweft\n"), None);
    }
}
