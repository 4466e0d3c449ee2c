//! Brings the kernel to a state.

use fabric_runtime::chain;
use netlink::{Failure, Handle, NetlinkError, Scope};
use netplan::{Family, Op, State, Sysctl, Vxlan, names, plan};

/// Number of steps attempted and the first of them, and the problems met.
#[derive(Default)]
pub(crate) struct Applied {
    pub(crate) steps: usize,
    pub(crate) first: Option<String>,
    pub(crate) failures: usize,
    /// The firewall table is in force.
    pub(crate) is_guarded: bool,
    pub(crate) problems: Vec<String>,
}

impl Applied {
    /// True if all steps were taken.
    pub(crate) fn is_whole(&self) -> bool {
        self.failures == 0
    }
}

/// Brings what is ours to `want`.
pub(crate) async fn apply(handle: &Handle, want: &State) -> Applied {
    let have = match observe(handle, want).await {
        Ok(have) => have,
        Err(error) => {
            let problem = format!("cannot read the kernel's tables: {}", chain(&error));
            return Applied { failures: 1, problems: vec![problem], ..Applied::default() };
        }
    };
    let steps = plan(&have, want);
    if !steps.is_empty() {
        tracing::info!(steps = steps.len(), "changing the kernel's tables");
    }
    let mut problems = Vec::new();
    for failure in handle.apply(&steps).await {
        problems.push(problem(handle, &failure).await);
    }
    let first = steps.first().map(ToString::to_string);
    let failures = problems.len();
    Applied { steps: steps.len(), first, failures, problems, ..Applied::default() }
}

/// All that is ours, besides the firewall.
pub(crate) fn scope(sysctls: impl Iterator<Item = Sysctl>) -> Scope {
    Scope {
        links: [Family::Ipv4, Family::Ipv6].map(|f| names::device(f).to_owned()).into(),
        tables: [names::TABLE, names::BACKSTOP_TABLE].into(),
        protocol: names::PROTOCOL,
        last_rule: Some(names::PRIORITY),
        sysctls: sysctls.collect(),
        ..Scope::default()
    }
}

/// Reads what is ours. Devices of ours that were renamed are included where they prevent a desired
/// one, so that the plan deletes them.
pub(crate) async fn observe(handle: &Handle, want: &State) -> Result<State, NetlinkError> {
    let mut have = handle.observe(&scope(want.sysctls.keys().cloned())).await?;
    for (name, desired) in &want.links {
        if !have.links.contains_key(name) {
            let like = handle.vxlans_like(desired).await?.into_iter();
            have.links.extend(like.filter(|(_, device)| is_renamed(device, desired)));
        }
    }
    Ok(have)
}

/// True only for a device with weft's alias, the VNI, port and family of the desired one, and this
/// node's MAC address. One that lacks any of these may be another program's.
fn is_renamed(device: &Vxlan, desired: &Vxlan) -> bool {
    device.can_become(desired) && device.mac == desired.mac
}

async fn problem(handle: &Handle, failure: &Failure) -> String {
    if let Op::AddLink(name, desired) = &failure.op
        && failure.source.is_existing()
    {
        let mut like = handle.vxlans_like(desired).await.unwrap_or_default();
        // Made since the observation: the next plan replaces it.
        like.retain(|(other, _)| other != name);
        return obstacles(name, desired, &like).unwrap_or_else(|| chain(failure));
    }
    chain(failure)
}

/// Problem of a VXLAN device that the kernel refuses beside others of its VNI and UDP port.
fn obstacles(name: &str, desired: &Vxlan, like: &[(String, Vxlan)]) -> Option<String> {
    let devices: Vec<String> = like
        .iter()
        .map(|(other, device)| match device.vni {
            0 => other.clone(),
            _ => format!("{other} (made by weft, by its alias)"),
        })
        .collect();
    let commands: Vec<String> =
        like.iter().map(|(other, _)| format!("`ip link del {other}`")).collect();
    (!like.is_empty()).then(|| {
        format!(
            "cannot make the device {name}: VNI {} and UDP port {} are taken by the VXLAN device \
             {}; remove it ({}) or change its VNI or port",
            desired.vni,
            desired.port,
            devices.join(", "),
            commands.join(", ")
        )
    })
}
