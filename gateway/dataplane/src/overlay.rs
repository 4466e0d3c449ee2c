//! Network namespaces, devices and routes of a gateway, and what of them is seen from the host.
//!
//! The inner namespace (and standalone the "pod" namespace) has no name: only this process holds
//! it, so it ends with the process, whatever ends that.

mod filter;
mod inner;
mod link;
mod mtu;
mod queue;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fabric_api::overlay_v6;
use fabric_runtime::chain;
use gateway_config::desired::Desired;
use lane::{Offloads, Tun, open_tun};
use netlink::{Events, Handle, NetlinkError, Netns, NetnsError, Scope, Settings};
use netplan::{Family, Op, State, Sysctl, plan};

use inner::Facts;
use link::{Link, POD_END};
use mtu::Path;

pub use filter::Filter;
pub use inner::TUN;
pub use link::host_end_name;
pub use mtu::{TunnelMtu, Way};
pub use queue::tun_overflows;

/// MTU of the underlay while no way to a node is known, in bytes.
const USUAL_MTU: u32 = 1500;

/// Time until notifications that ended are asked for again.
const RESUBSCRIBE: Duration = Duration::from_secs(1);
/// Interval between reads of settings. The kernel notifies of those that packets depend on.
const SETTINGS: Duration = Duration::from_secs(2);

/// The gateway's place in the network.
#[derive(Debug)]
pub struct Overlay {
    /// Namespace that the process runs in: the host's, or in Kubernetes the pod's.
    host: Handle,
    /// Standalone only.
    pod: Option<Pod>,
    inner: Handle,
    /// Settings that this kernel has.
    sysctls: Vec<(Sysctl, u32)>,
    events: Vec<Events>,
}

#[derive(Debug)]
struct Pod {
    handle: Handle,
    host_end: String,
}

/// Known endpoint of the peer, and the largest IP packet known to get there, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: SocketAddr,
    pub path_mtu: Option<u32>,
}

/// Result of [`Overlay::apply`].
#[derive(Debug)]
pub struct Applied {
    /// The tunnel's MTU in force.
    pub mtu: TunnelMtu,
    /// Source address of packets to the peer.
    pub source: Option<IpAddr>,
    /// The TUN, if it had to be made: for the first time, or because someone deleted it.
    pub new_tun: Option<Tun>,
    /// The steps that were taken; none if all was as wanted.
    pub steps: Vec<Op>,
    /// Steps that failed, one line each.
    pub problems: Vec<String>,
}

/// Step of setting the overlay up that failed.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error("cannot make the gateway's network namespace")]
    Namespace(#[from] NetnsError),
    #[error("cannot set up the gateway's network")]
    Netlink(#[from] NetlinkError),
    #[error("cannot make the device {TUN}")]
    Tun(#[source] std::io::Error),
}

impl Overlay {
    /// Makes the namespaces. `host_end` names the veth to the host, standalone; a leftover of that
    /// name is removed.
    pub async fn new(host_end: Option<String>) -> Result<Self, OverlayError> {
        let host_ns = Netns::current()?;
        let host = Handle::open(&host_ns)?;
        let pod = match host_end {
            Some(host_end) => {
                host.delete_link(&host_end).await?;
                Some(Pod { handle: Handle::open(&Netns::unnamed()?)?, host_end })
            }
            None => None,
        };
        let underlay_ns = pod.as_ref().map_or(&host_ns, |pod| pod.handle.netns());
        let inner_ns = Netns::unnamed()?;
        let inner = Handle::open(&inner_ns)?.over(Handle::open(underlay_ns)?);
        let sysctls = set_sysctls(&inner_ns)?;
        let mut overlay = Self { host, pod, inner, sysctls, events: Vec::new() };
        overlay.events = overlay.watch()?;
        Ok(overlay)
    }

    /// The namespace of the TUN and of the probes.
    pub fn inner(&self) -> &Netns {
        self.inner.netns()
    }

    /// Standalone: the namespace of the VXLAN devices' sockets.
    pub fn pod(&self) -> Option<&Netns> {
        self.pod.as_ref().map(|pod| pod.handle.netns())
    }

    /// Makes the kernel's state match `desired`.
    ///
    /// A step that fails is a problem, not an end: the others are done all the same.
    pub async fn apply(
        &self,
        desired: &Desired,
        peer: Option<Peer>,
        offloads: Offloads,
    ) -> Result<Applied, OverlayError> {
        let mut changes = Changes { ipv6: self.has_ipv6(), ..Changes::default() };
        let underlay_mtu = self.underlay_mtu(desired).await?;
        self.apply_link(desired, underlay_mtu, &mut changes).await?;
        let new_tun = self.make_tun(offloads).await?;
        let path = self.path_to(peer).await?;
        let source = path.and_then(|path| path.source);
        let (mut want, mtu) = inner::wanted(desired, Facts { underlay_mtu, path });
        want.sysctls = self.sysctls.iter().cloned().collect();
        let have = self.inner.observe(&inner::scope()).await?;
        changes.make(&self.inner, &have, want).await;
        changes.problems.extend(self.findings(desired)?);
        let Changes { steps, problems, .. } = changes;
        Ok(Applied { mtu, source, new_tun, steps, problems })
    }

    /// Returns after someone changed something of ours. A setting counts as changed when it is other
    /// than at the time of the call.
    pub async fn changed(&mut self) {
        let mut settings = match self.watch_settings() {
            Ok(settings) => settings,
            // They are looked at with the next resync.
            Err(error) => {
                tracing::warn!(%error, "cannot watch settings");
                Settings::default()
            }
        };
        loop {
            if self.events.is_empty() {
                // Until it works again, what was changed heals at the next resync.
                tokio::time::sleep(RESUBSCRIBE).await;
                self.events = self.watch().unwrap_or_default();
                continue;
            }
            let events: Vec<_> = self.events.iter_mut().map(|e| Box::pin(e.changed())).collect();
            let (outcome, _, _) = tokio::select! {
                () = settings.changed() => return,
                first = futures::future::select_all(events) => first,
            };
            let Err(error) = outcome else { return };
            tracing::warn!(%error, "lost the kernel's notifications, subscribing again");
            self.events.clear();
        }
    }

    /// Takes the host's end of the link away; the namespaces go when this value is dropped.
    pub async fn remove(self) -> Result<(), OverlayError> {
        if let Some(pod) = &self.pod {
            self.host.delete_link(&pod.host_end).await?;
        }
        Ok(())
    }

    fn has_ipv6(&self) -> bool {
        self.sysctls.iter().any(|(sysctl, _)| sysctl.path().starts_with("net/ipv6/"))
    }

    fn watch(&self) -> Result<Vec<Events>, NetlinkError> {
        let mut events = vec![self.inner.events(&inner::scope())?];
        let mut host = Scope::default();
        if let Some(pod) = &self.pod {
            events.push(pod.handle.events(&Link::pod_scope())?);
            host = Link::host_scope(&pod.host_end);
        }
        // Also for the MTU of the device towards the peer.
        events.push(self.host.events(&host)?);
        Ok(events)
    }

    /// Watches the settings of the devices that exist now.
    fn watch_settings(&self) -> Result<Settings, NetlinkError> {
        let own = self.sysctls.iter().map(|(sysctl, _)| sysctl);
        let settings = Settings::watch(self.inner.netns(), own, SETTINGS)?;
        let Some(pod) = &self.pod else { return Ok(settings) };
        let (pod_end, host_end) = (Link::pod_scope(), Link::host_scope(&pod.host_end));
        let pod_end = Settings::watch(pod.handle.netns(), pod_end.sysctls.iter(), SETTINGS)?;
        let host_end = Settings::watch(self.host.netns(), host_end.sysctls.iter(), SETTINGS)?;
        Ok(settings.and(pod_end).and(host_end))
    }

    async fn make_tun(&self, offloads: Offloads) -> Result<Option<Tun>, OverlayError> {
        if self.inner.link(TUN).await?.is_some() {
            return Ok(None);
        }
        let tun = self.inner().run(|| open_tun(TUN, offloads))?;
        tun.map(Some).map_err(OverlayError::Tun)
    }

    /// Standalone: the veth pair, and both its ends' surroundings.
    async fn apply_link(
        &self,
        desired: &Desired,
        mtu: u32,
        changes: &mut Changes,
    ) -> Result<(), OverlayError> {
        let Some(pod) = &self.pod else { return Ok(()) };
        let Some(pod_address) = desired.link_address else {
            changes.problems.push(
                "spec.overlay.linkAddress: missing; the nodes cannot reach the gateway".to_owned(),
            );
            return Ok(());
        };
        let (host_mac, pod_mac) = loop {
            let ends = (self.host.link(&pod.host_end).await?, pod.handle.link(POD_END).await?);
            if let (Some(host), Some(end)) = ends
                && let (Some(host_mac), Some(pod_mac)) = (host.mac, end.mac)
            {
                break (host_mac, pod_mac);
            }
            self.host.delete_link(&pod.host_end).await?;
            // The host's end may have another name now.
            pod.handle.delete_link(POD_END).await?;
            self.host.add_veth(&pod.host_end, POD_END, pod.handle.netns()).await?;
            no_link_local(self.host.netns(), &pod.host_end)?;
            no_link_local(pod.handle.netns(), POD_END)?;
        };
        let own = match desired.own_underlay {
            Some(own) if self.host.addresses().await?.iter().any(|a| a.address == own) => Some(own),
            Some(_) | None => None,
        };
        let nodes = desired.nodes.iter().map(|node| node.underlay).collect();
        let host_end = pod.host_end.clone();
        let pod_address_v6 = desired.link_address_v6.unwrap_or_else(|| overlay_v6(pod_address));
        let link =
            Link { host_end, host_mac, pod_mac, pod_address, pod_address_v6, mtu, nodes, own };
        let have = pod.handle.observe(&Link::pod_scope()).await?;
        changes.make(&pod.handle, &have, link.pod_state()).await;
        let have = self.host.observe(&Link::host_scope(&link.host_end)).await?;
        changes.make(&self.host, &have, link.host_state()).await;
        Ok(())
    }

    /// The least MTU among the ways to the nodes, in bytes.
    async fn underlay_mtu(&self, desired: &Desired) -> Result<u32, OverlayError> {
        let mut least = None;
        for node in &desired.nodes {
            let mtu = self.mtu_towards(node.underlay).await?;
            least = [least, mtu].into_iter().flatten().min();
        }
        Ok(least.unwrap_or(USUAL_MTU))
    }

    /// A host's own address is reached over `lo`, but its packets to other nodes will be as large
    /// as the device with that address takes.
    async fn mtu_towards(&self, underlay: IpAddr) -> Result<Option<u32>, OverlayError> {
        let Some(route) = self.host.route_to(underlay).await? else { return Ok(None) };
        if !route.local {
            return Ok(Some(route.learnt_mtu.unwrap_or(route.mtu)));
        }
        let addresses = self.host.addresses().await?;
        let Some(own) = addresses.iter().find(|a| a.address == underlay) else { return Ok(None) };
        Ok(self.host.link(&own.dev).await?.filter(|link| link.name != "lo").map(|link| link.mtu))
    }

    async fn path_to(&self, peer: Option<Peer>) -> Result<Option<Path>, OverlayError> {
        let Some(Peer { address, path_mtu }) = peer else { return Ok(None) };
        let route = self.host.route_to(mtu::canonical(address.ip())).await?;
        let family = mtu::family_of(address);
        Ok(route.map(|route| Path {
            family,
            device: route.mtu,
            found: path_mtu.or(route.learnt_mtu),
            source: route.source,
        }))
    }

    /// Returns the obstacles that remain although every step succeeded.
    fn findings(&self, desired: &Desired) -> Result<Vec<String>, OverlayError> {
        let mut findings = Vec::new();
        for (family, setting) in
            [(Family::Ipv4, "net/ipv4/ip_forward"), (Family::Ipv6, "net/ipv6/conf/all/forwarding")]
        {
            let nodes = desired.nodes.iter().filter(|n| Family::of(n.underlay) == family).count();
            let sysctl = Sysctl::of_namespace(setting);
            if self.pod.is_some()
                && nodes > 1
                && netlink::read_sysctl(self.host.netns(), &sysctl)? == Some(0)
            {
                let setting = setting.replace('/', ".");
                findings.push(format!("{setting} is 0 on this host, so other nodes cannot reach the gateway; set it to 1"));
            }
        }
        Ok(findings)
    }
}

/// Settings of the inner namespace; those that this kernel lacks (it may have no IPv6) are left out.
fn set_sysctls(netns: &Netns) -> Result<Vec<(Sysctl, u32)>, OverlayError> {
    let mut set = Vec::new();
    let (path, value) = inner::NO_LINK_LOCAL;
    let no_link_local = Sysctl::of_namespace(path);
    if netlink::read_sysctl(netns, &no_link_local)?.is_some() {
        netlink::write_sysctl(netns, &no_link_local, value)?;
    }
    for (sysctl, value) in inner::sysctls() {
        if netlink::read_sysctl(netns, &sysctl)?.is_some() {
            netlink::write_sysctl(netns, &sysctl, value)?;
            set.push((sysctl, value));
        }
    }
    Ok(set)
}

/// CNIs and host daemons pick up devices that have addresses.
fn no_link_local(netns: &Netns, dev: &str) -> Result<(), NetlinkError> {
    let sysctl = Sysctl::of_device(Family::Ipv6, dev, "addr_gen_mode");
    match netlink::read_sysctl(netns, &sysctl)? {
        Some(_) => netlink::write_sysctl(netns, &sysctl, 1),
        None => Ok(()),
    }
}

/// Changes that one pass made.
#[derive(Debug, Default)]
struct Changes {
    /// The kernel has IPv6; without it nothing of it is wanted.
    ipv6: bool,
    steps: Vec<Op>,
    problems: Vec<String>,
}

impl Changes {
    async fn make(&mut self, handle: &Handle, have: &State, want: State) {
        let ops = plan(have, &if self.ipv6 { want } else { without_ipv6(want) });
        for op in &ops {
            tracing::debug!(%op, "step");
        }
        let failures = handle.apply(&ops).await;
        self.problems.extend(failures.iter().map(|f| format!("{}: {}", f.op, chain(&f.source))));
        self.steps.extend(ops);
    }
}

fn without_ipv6(mut state: State) -> State {
    state.links.retain(|_, link| link.family == Family::Ipv4);
    state.addresses.retain(|address| address.address.is_ipv4());
    state.neighbours.retain(|(_, ip), _| ip.is_ipv4());
    state.fdb.retain(|_, to| to.is_ipv4());
    state.routes.retain(|key, _| key.to.is_ipv4());
    state.rules.retain(|rule| rule.family == Family::Ipv4);
    state.sysctls.retain(|sysctl, _| !sysctl.path().starts_with("net/ipv6/"));
    state
}
