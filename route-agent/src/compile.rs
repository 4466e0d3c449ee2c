use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use fabric_api::fabric::{Diversion, NodeGateway, VNI, VXLAN_PORT};
use fabric_api::{Cidr, Mac, labels, overlay_v6};
use foreign::foreign_routes::Foreign;
use netplan::names::{
    self, BACKSTOP_PRIORITY, BACKSTOP_TABLE, IPV6_MIN_MTU, MAIN_TABLE, NO_POD_PRIORITY,
    OWN_NETWORKS_PRIORITY, POD_ROUTES_PRIORITY, PRIORITY, PROTOCOL, TABLE,
};
use netplan::{Family, Firewall, Link, Route, RouteKey, Rule, RuleAction, State, Sysctl, Vxlan};

use crate::host_state::HostState;
use crate::parsed_config::{ParsedConfig, ParsedGateway, ParsedPeering};

/// Desired state of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Compiled {
    pub(crate) state: State,
    pub(crate) firewall: Firewall,
    /// Settings that packets between pods and peers depend on, and whether they are on.
    pub(crate) forwarding: BTreeMap<Sysctl, bool>,
    /// Parts of the config that can't be applied, and the obstacles to its working. A problem of
    /// one peering leaves the others alone.
    pub(crate) problems: BTreeSet<String>,
    /// Peers' prefixes that are the node's own.
    pub(crate) conflicts: Vec<Foreign>,
}

impl Compiled {
    /// Refuses new connections to peers, whatever their config.
    pub(crate) fn refuse(&mut self, config: &ParsedConfig<'_>, peers: &BTreeSet<String>) {
        let lost = config.peerings.iter().filter(|of| peers.contains(&of.spec.peer_cluster_id));
        let prefixes = lost.flat_map(|peering| &peering.prefixes).copied();
        let Firewall { peers, unconnected, .. } = &mut self.firewall;
        unconnected.extend(prefixes.filter(|prefix| peers.contains(prefix)));
    }
}

/// Same input, same output. `refused` are prefixes that have no peering.
pub(crate) fn compile(
    config: &ParsedConfig<'_>,
    host_state: &HostState,
    refused: &BTreeSet<Cidr>,
) -> Compiled {
    let problems = config.problems.clone();
    let out = Compiled { problems, ..Compiled::default() };
    let mut compiler = Compiler { config, host_state, out };
    compiler.add_links();
    compiler.add_rules();
    for peering in &config.peerings {
        compiler.add_peering(peering);
    }
    compiler.add_refused(refused);
    let conflicting = config
        .refused
        .iter()
        .filter(|prefix| means_of_refusal(config, host_state, prefix) == Some(Means::Firewall));
    compiler.out.firewall.conflicts.extend(conflicting);
    compiler.add_internal();
    compiler.add_own();
    compiler.note_missing();
    compiler.note_carriers();
    compiler.out
}

/// Means by which a prefix without a peering is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Means {
    /// A table of its own, for all packets.
    Table,
    /// The firewall, for those of pods, as with its peering: the overlay runs on the prefix.
    Firewall,
}

/// `None` if a peering has the prefix, or it would take pods' packets.
pub(crate) fn means_of_refusal(
    config: &ParsedConfig<'_>,
    host_state: &HostState,
    prefix: &Cidr,
) -> Option<Means> {
    let compiler = Compiler { config, host_state, out: Compiled::default() };
    let is_of_peer = config.peers().any(|peer| peer.overlaps(prefix));
    let is_departed = !is_of_peer && compiler.pods_in(prefix).is_none();
    is_departed.then(|| match compiler.underlay_in(prefix) {
        None => Means::Table,
        Some(_) => Means::Firewall,
    })
}

struct Compiler<'a> {
    config: &'a ParsedConfig<'a>,
    host_state: &'a HostState,
    out: Compiled,
}

impl<'a> Compiler<'a> {
    fn add_links(&mut self) {
        let Some(mac) = self.config.mac else { return };
        let families = self.config.gateways().map(|gateway| Family::of(gateway.underlay));
        let families: BTreeSet<Family> = families.collect();
        for family in families {
            let dev = names::device(family);
            let mtu = self.underlay_mtu(family) - names::overhead(family);
            let vxlan = Vxlan {
                vni: VNI,
                port: VXLAN_PORT,
                family,
                elsewhere: false,
                checksum: true,
                mtu,
                mac,
                up: true,
            };
            self.out.state.links.insert(dev.to_owned(), vxlan);
            let has_ipv6 = self.has_ipv6(dev);
            let mut set = |family, setting: &str, value| {
                self.out.state.sysctls.insert(Sysctl::of_device(family, dev, setting), value);
            };
            set(Family::Ipv4, "forwarding", 1);
            // Loose, for a gateway may answer over the other family's device. The kernel takes
            // the larger of this and conf.all, so a strict conf.all stays as it is.
            set(Family::Ipv4, "rp_filter", 2);
            // A sender that does not know the MAC address can use the broadcast address.
            set(Family::Ipv4, "drop_unicast_in_l2_multicast", 1);
            if has_ipv6 {
                set(Family::Ipv6, "disable_ipv6", 0);
                set(Family::Ipv6, "accept_ra", 0);
                set(Family::Ipv6, "drop_unicast_in_l2_multicast", 1);
                set(Family::Ipv6, "forwarding", 1);
            }
        }
    }

    /// MTU of the device that has the node's address.
    fn underlay_mtu(&mut self, family: Family) -> u32 {
        const ETHERNET: u32 = 1500;
        let dev = self.underlay_device(family);
        if let Some(mtu) = dev.and_then(|dev| self.host_state.mtus.get(dev)) {
            return (*mtu).max(IPV6_MIN_MTU / 2);
        }
        self.problem(format!(
            "no device has the node's {family} address: taking {ETHERNET} bytes for the MTU of \
             the underlay; give a device that address, or the Node the one that it has"
        ));
        ETHERNET
    }

    /// The device that has the node's address.
    fn underlay_device(&self, family: Family) -> Option<&str> {
        let mut own = self.config.spec.underlay.iter().filter(|ip| Family::of(**ip) == family);
        own.find_map(|ip| self.host_state.device_of(*ip))
    }

    /// Returns whether a device of ours has IPv6, which Linux takes from those that are too narrow.
    fn has_ipv6(&self, dev: &str) -> bool {
        let link = self.out.state.links.get(dev);
        self.host_state.ipv6 && link.is_some_and(|link| link.mtu >= IPV6_MIN_MTU)
    }

    fn add_rules(&mut self) {
        let families = [(Family::Ipv4, true), (Family::Ipv6, self.host_state.ipv6)];
        let lookups = [(PRIORITY, TABLE), (BACKSTOP_PRIORITY, BACKSTOP_TABLE)];
        for (family, _) in families.into_iter().filter(|(_, present)| *present) {
            for (priority, table) in lookups {
                self.add_rule(Rule {
                    priority,
                    family,
                    iif: None,
                    to: None,
                    action: RuleAction::Lookup(table),
                    protocol: PROTOCOL,
                });
            }
        }
        // A pod outside the node's pod CIDRs has no rules, which would be two a pod: the gateway has
        // no route to it once it is gone.
        for pods in self.config.pod_cidrs() {
            self.confine_to_pods(pods);
        }
    }

    /// Keeps what a peer sends to an address that no pod has from leaving by the default route: out
    /// of weft's devices a pod CIDR of the node is reached by specific routes of the main table only.
    /// Other destinations (addresses of the node, IP resources) are routed as ever.
    fn confine_to_pods(&mut self, pods: Cidr) {
        let family = Family::of_prefix(&pods);
        if family == Family::Ipv6 && !self.host_state.ipv6 {
            return;
        }
        let devices: Vec<String> = self.out.state.links.keys().cloned().collect();
        let actions = [
            (POD_ROUTES_PRIORITY, RuleAction::LookupSpecific(MAIN_TABLE)),
            (NO_POD_PRIORITY, RuleAction::Unreachable),
        ];
        for dev in devices {
            for (priority, action) in actions {
                let (iif, to) = (Some(dev.clone()), Some(pods));
                let rule = Rule { priority, family, iif, to, action, protocol: PROTOCOL };
                self.add_rule(rule);
            }
        }
    }

    fn add_rule(&mut self, rule: Rule) {
        self.out.state.rules.insert(rule);
    }

    fn add_peering(&mut self, peering: &ParsedPeering<'_>) {
        let prefixes = self.usable_prefixes(peering);
        let gateway = peering.gateway.filter(|_| self.config.spec.overlay.is_some());
        if let Some(gateway) = gateway {
            self.add_gateway(gateway);
        }
        for prefix in prefixes {
            self.out.firewall.peers.insert(prefix);
            self.put_backstops(prefix);
            let way = gateway.and_then(|gateway| self.way(gateway.spec, peering, &prefix));
            if !peering.spec.connected || way.is_none() {
                self.out.firewall.unconnected.insert(prefix);
            }
            if let Some(route) = way {
                self.put(RouteKey::new(TABLE, prefix), route);
            }
        }
    }

    fn add_refused(&mut self, refused: &BTreeSet<Cidr>) {
        for prefix in refused {
            self.out.firewall.peers.insert(*prefix);
            self.out.firewall.unconnected.insert(*prefix);
            self.put_backstops(*prefix);
            self.leave_own_networks(prefix);
        }
    }

    /// Those that tunnels lead to: they take nothing that the overlay runs on, nor pods of the cluster or another peer.
    fn usable_prefixes(&mut self, peering: &ParsedPeering<'_>) -> Vec<Cidr> {
        let peer = &peering.spec.peer_cluster_id;
        let mut usable = Vec::new();
        for prefix in &peering.prefixes {
            if let Some(what) = self.pods_in(prefix) {
                self.problem(format!(
                    "peer {peer}: prefix {prefix} is refused: it would cover {what}"
                ));
                continue;
            }
            if let Some(what) = self.underlay_in(prefix) {
                self.out.firewall.conflicts.insert(*prefix);
                let cause = format!("the peer's prefix {prefix} would cover {what}");
                self.conflict(peer, *prefix, &cause);
                continue;
            }
            usable.push(*prefix);
            for (network, dev) in self.leave_own_networks(prefix) {
                self.note_own_network(peer, *prefix, network, dev);
            }
        }
        usable
    }

    /// A network that no route leads to, as while its device is down, takes nothing.
    fn note_own_network(&mut self, peer: &str, prefix: Cidr, network: Cidr, dev: &str) {
        let Some(taken) = network.and(&prefix) else { return };
        if !self.host_state.has_route_in(&taken) {
            return;
        }
        if taken == prefix {
            let cause = format!(
                "the peer's prefix {prefix} lies in the node's own network {network} on {dev}"
            );
            return self.conflict(peer, prefix, &cause);
        }
        let cause = format!(
            "the peer's prefix {prefix} has the node's own network {network} on {dev} in it"
        );
        let remedy = format!(
            "{}or give that network another address, or the peer another prefix",
            Diversion::WORDS
        );
        self.divert(peer, (prefix, taken), &cause, &remedy);
    }

    /// Notes that nothing passes between this node's pods and a whole prefix.
    fn conflict(&mut self, peer: &str, prefix: Cidr, cause: &str) {
        let remedy = format!(
            "{}reserve {prefix} once it is not refused any more (a Network with the labels {}: reserved and \
             {}: \"true\"), and peer again; or give the node other addresses",
            Diversion::WORDS,
            labels::NETWORK_TYPE,
            labels::NETWORK_NOT_REMAPPED
        );
        self.divert(peer, (prefix, prefix), cause, &remedy);
    }

    /// Notes that a part of a peer's prefix is not reached.
    fn divert(&mut self, peer: &str, (prefix, part): (Cidr, Cidr), cause: &str, remedy: &str) {
        let problem = format!(
            "peer {peer}: nothing passes between this node's pods and {part}: {cause}; {remedy}"
        );
        let (cause, prefixes) = (Some(cause.to_owned()), vec![prefix]);
        let removal = remedy.to_owned();
        self.out.conflicts.push(Foreign { problem, removal, cause, prefixes });
    }

    /// Leaves the node its own networks within a prefix, or the part of one that is a prefix, which may have come after
    /// that. The rest stays in the tunnel, or refused. Returns these networks, and their devices.
    fn leave_own_networks(&mut self, prefix: &Cidr) -> Vec<(Cidr, &'a str)> {
        let own = self.host_state.networks().filter(|(network, _)| network.overlaps(prefix));
        let own: Vec<_> = own.collect();
        for (network, _) in &own {
            let to = network.and(prefix);
            self.out.firewall.own_networks.extend(to);
            self.add_rule(Rule {
                priority: OWN_NETWORKS_PRIORITY,
                family: Family::of_prefix(network),
                iif: None,
                to,
                action: RuleAction::LookupSpecific(MAIN_TABLE),
                protocol: PROTOCOL,
            });
        }
        own
    }

    /// Description of what the overlay runs on that a route to this prefix would take packets from.
    fn underlay_in(&self, prefix: &Cidr) -> Option<String> {
        let underlay = self.host_state.underlay_networks(self.config);
        if let Some(network) = underlay.iter().find(|network| network.overlaps(prefix)) {
            let mut networks = self.host_state.networks();
            let dev =
                networks.find(|(of, _)| of == network).map(|(_, dev)| dev).unwrap_or_default();
            return Some(format!("the node's own network {network} on {dev}"));
        }
        let of_gateway = |g: &NodeGateway| [&[g.underlay, g.overlay.into()], &*g.links].concat();
        let of_gateways = self.config.gateways().flat_map(of_gateway);
        let mut addresses = of_gateways.chain(self.config.spec.underlay.iter().copied());
        let address = addresses.find(|address| prefix.contains(*address))?;
        Some(format!("the address {address}, which the overlay runs on"))
    }

    /// Description of the pods that a route to this prefix would take packets from.
    fn pods_in(&self, prefix: &Cidr) -> Option<String> {
        if let Some(pods) = self.config.pods().find(|pods| pods.overlaps(prefix)) {
            return Some(format!("the cluster's own pods {pods}"));
        }
        let mut peers = self.out.firewall.peers.iter().filter(|peer| peer.overlaps(prefix));
        peers.next().map(|peer| format!("another peer's prefix {peer}"))
    }

    /// Neighbours, FDB entry and routes that make a gateway reachable.
    fn add_gateway(&mut self, ParsedGateway { spec: gateway, mac }: ParsedGateway<'_>) {
        let dev = names::device(Family::of(gateway.underlay));
        self.out.state.fdb.insert((dev.to_owned(), mac), gateway.underlay);
        let overlay = [Some(IpAddr::from(gateway.overlay)), self.overlay_v6(gateway)];
        for address in overlay.into_iter().flatten() {
            self.out.state.neighbours.insert((dev.to_owned(), address), mac);
            let route = self.with_source(Route::dev(dev, PROTOCOL), address);
            self.put(RouteKey::new(TABLE, address.into()), route);
            if gateway.probe.is_some() {
                self.out.firewall.probed.insert(address.into());
            }
        }
        for link in &gateway.links {
            self.add_link(*link, mac);
        }
    }

    fn overlay_v6(&self, gateway: &NodeGateway) -> Option<IpAddr> {
        let dev = names::device(Family::of(gateway.underlay));
        self.has_ipv6(dev).then(|| overlay_v6(gateway.overlay).into())
    }

    /// The link of a gateway of this host, which itself makes the route to it: while that is gone, the
    /// backstop keeps VXLAN from leaving by the default route.
    fn add_link(&mut self, address: IpAddr, mac: Mac) {
        self.put(RouteKey::overlay_backstop(TABLE, address.into()), Route::unreachable(PROTOCOL));
        let mut own = self.config.spec.underlay.iter();
        if let Some(host) = own.find(|own| own.is_ipv4() == address.is_ipv4()) {
            self.out.firewall.links.insert(Link { host: *host, address, mac });
        }
    }

    /// The route through a gateway; `None` if the overlay can't carry it.
    fn way(
        &mut self,
        gateway: &NodeGateway,
        ParsedPeering { spec: peering, .. }: &ParsedPeering<'_>,
        prefix: &Cidr,
    ) -> Option<Route> {
        let dev = names::device(Family::of(gateway.underlay));
        let device_mtu = self.out.state.links.get(dev)?.mtu;
        let mtu = peering.mtu.min(device_mtu);
        let peer = &peering.peer_cluster_id;
        if prefix.is_ipv4() {
            return Some(self.through(gateway.overlay.into(), dev).with_mtu(mtu));
        }
        let overlay = self.overlay_v6(gateway);
        let problem = match overlay {
            Some(overlay) if mtu >= IPV6_MIN_MTU => {
                return Some(self.through(overlay, dev).with_mtu(mtu));
            }
            Some(_) => format!(
                "peer {peer}: no way to {prefix}: IPv6 needs {IPV6_MIN_MTU} bytes, the MTU is {mtu}"
            ),
            None if self.host_state.ipv6 => self.too_narrow(Family::of(gateway.underlay)),
            None => format!("peer {peer}: no way to {prefix}: this kernel has no IPv6"),
        };
        if self.has_own(Family::Ipv6) {
            self.problem(problem);
        }
        None
    }

    /// Returns whether the cluster has addresses of a family: without any, nobody here sends to peers' of it.
    fn has_own(&self, family: Family) -> bool {
        let mut pods = self.config.pods().chain(self.config.outside_pods.iter().copied());
        let mut external = self.config.spec.external.iter();
        pods.any(|pods| Family::of_prefix(&pods) == family)
            || external.any(|external| Family::of(*external) == family)
    }

    /// Problem of an underlay whose device leaves too little of a packet for IPv6: one for all peers.
    fn too_narrow(&self, family: Family) -> String {
        let dev = self.underlay_device(family).unwrap_or_default();
        let mtu = self.host_state.mtus.get(dev).copied().unwrap_or_default();
        let needed = IPV6_MIN_MTU + names::overhead(family);
        format!(
            "the MTU of {dev} is {mtu} bytes, and pods' IPv6 over VXLAN needs {needed}: IPv6 to \
             peers is refused; raise it (`ip link set {dev} mtu {needed}`, or more)"
        )
    }

    fn through(&self, gateway: IpAddr, dev: &str) -> Route {
        self.with_source(Route::onlink(gateway, dev, PROTOCOL), gateway)
    }

    /// The device has no address, so the kernel would take any of the node's for its own packets,
    /// even one among the pods', which keep theirs.
    fn with_source(&self, route: Route, gateway: IpAddr) -> Route {
        let fits = |ip: &&IpAddr| {
            Family::of(**ip) == Family::of(gateway) && self.host_state.device_of(**ip).is_some()
        };
        match self.config.spec.underlay.iter().find(fits) {
            Some(own) => route.with_source(*own),
            None => route,
        }
    }

    /// Overlay and link addresses end in weft's table instead of leaving by the default route, also
    /// those of gateways that are gone.
    fn add_internal(&mut self) {
        let Some(internal) = self.config.internal else { return };
        let of_v6 = self.host_state.ipv6.then(|| match internal.address() {
            // Addresses of links differ from those of the overlay in the 16-bit group before the
            // last two.
            IpAddr::V4(_) => Cidr::around(overlay_v6(Ipv4Addr::UNSPECIFIED).into(), 80),
            IpAddr::V6(_) => None,
        });
        for prefix in [Some(internal), of_v6.flatten()].into_iter().flatten() {
            let own = self.host_state.networks().find(|(network, _)| network.overlaps(&prefix));
            match own {
                None => {
                    for table in [TABLE, BACKSTOP_TABLE] {
                        let key = RouteKey::overlay_backstop(table, prefix);
                        self.put(key, Route::unreachable(PROTOCOL));
                    }
                }
                Some((network, dev)) => self.problem(format!(
                    "internal CIDR {prefix}: the node's own network {network} on {dev} is in it"
                )),
            }
        }
    }

    /// The node's own addresses and IP resources.
    fn add_own(&mut self) {
        for address in &self.config.spec.external {
            // It is on no device: what NAT does not translate back would leave by default.
            self.put(RouteKey::new(TABLE, (*address).into()), Route::unreachable(PROTOCOL));
            match address {
                IpAddr::V4(ip) => _ = self.out.firewall.external_v4.get_or_insert(*ip),
                IpAddr::V6(ip) => _ = self.out.firewall.external_v6.get_or_insert(*ip),
            }
        }
        let firewall = &mut self.out.firewall;
        firewall.local_pods.extend(&self.config.local_pods);
        firewall.pods.extend(&self.config.cluster_pods);
        let exits = self.host_state.exits(self.config);
        firewall.exits.extend(exits.into_iter().map(str::to_owned));
        let uplinks = self.host_state.uplinks(self.config);
        firewall.uplinks.extend(uplinks.into_iter().map(str::to_owned));
        firewall.underlay = self.host_state.underlay_networks(self.config);
        firewall.has_symmetric_pods = self.host_state.has_symmetric_pods(self.config);
        for map in &self.config.spec.ips {
            firewall.targets.insert(map.external, map.target);
            if map.masquerade {
                firewall.masqueraded.insert(map.external);
            }
        }
        firewall.vxlan_sources.extend(&self.config.spec.vxlan_sources);
        firewall.full_masquerade = self.config.spec.full_masquerade;
    }

    fn note_missing(&mut self) {
        let peers = |v4| self.out.firewall.peers.iter().any(|peer| peer.is_ipv4() == v4);
        let (v4, v6) = (peers(true), peers(false));
        if self.config.spec.overlay.is_none() && (v4 || v6) {
            self.problem("the node has no overlay address yet".to_owned());
        }
        let families = [
            (Family::Ipv4, v4, self.out.firewall.external_v4.is_some()),
            (Family::Ipv6, v6, self.out.firewall.external_v6.is_some()),
        ];
        for (family, _, has_external) in families.into_iter().filter(|f| f.1) {
            if !self.has_own(family) {
                continue;
            }
            if !has_external {
                self.problem(format!(
                    "the node has no external {family} address yet: only pods reach {family} peers; it \
                     has one once the cluster has an {family} external CIDR"
                ));
            }
            for (setting, is_on) in self.host_state.forwarding_of(self.config, family) {
                self.out.forwarding.insert(setting.clone(), is_on);
                if !is_on {
                    let name = setting.name();
                    self.problem(format!("{name} is 0: this node forwards no packets of pods"));
                }
            }
        }
    }

    fn note_carriers(&mut self) {
        let carriers = self.host_state.underlay_carriers(self.config);
        for drop in HostState::without_carrier(&carriers) {
            let (cause, remedy) = (drop.cause, drop.remedy);
            self.problem(format!("{cause}, so nothing passes over it; {remedy}"));
        }
    }

    fn put_backstops(&mut self, prefix: Cidr) {
        for table in [TABLE, BACKSTOP_TABLE] {
            self.put(RouteKey::backstop(table, prefix), Route::unreachable(PROTOCOL));
        }
    }

    fn put(&mut self, key: RouteKey, route: Route) {
        self.out.state.routes.insert(key, route);
    }

    fn problem(&mut self, problem: String) {
        self.out.problems.insert(problem);
    }
}

#[cfg(test)]
mod tests;
