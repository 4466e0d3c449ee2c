//! Routes and rules of other programs: to report, and to take over from one that is gone.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use fabric_primitives::Cidr;
use libc::ENOENT;
use netlink_packet_core::Nla as _;
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteType,
};
use netlink_packet_route::rule::{
    RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange,
};
use netlink_packet_route::{AddressFamily, IpProtocol, RouteNetlinkMessage as Message};
use netplan::Family;

use crate::attributes::{ip, output_device, table_of};
use crate::{Handle, NetlinkError, message};

/// Route of a table, of any program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRoute {
    pub table: u32,
    pub to: Cidr,
    /// 0 is the first of IPv4's.
    pub metric: u32,
    /// `unreachable`, `blackhole`, `prohibit`, `throw` or `local`; empty for one that carries packets.
    pub kind: &'static str,
    pub gateway: Option<IpAddr>,
    pub dev: Option<String>,
    /// Marks whose route it is.
    pub protocol: u8,
}

/// Policy routing rule of any program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRule {
    pub priority: u32,
    pub from: Option<Cidr>,
    pub to: Option<Cidr>,
    pub iif: Option<String>,
    /// Type of service, protocol, ports and users that it compares, as `ip rule` takes them; empty if
    /// none. Forwarded packets are those of user 0.
    pub fields: String,
    pub mark: Option<Mark>,
    /// It compares what no forwarded packet has: a device that a socket is bound to, another user, a
    /// tunnel.
    pub is_for_sockets: bool,
    /// It applies to packets that do not have all of the above (`not`).
    pub is_inverted: bool,
    pub action: ForeignAction,
    /// Marks whose rule it is.
    pub protocol: u8,
}

/// Mark that a packet's has to equal under a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub value: u32,
    pub mask: u32,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fwmark {:#x}/{:#x}", self.value, self.mask)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignAction {
    /// Looks into this table, but for routes of prefixes up to this length.
    Lookup(u32, Option<u32>),
    /// Goes on with the rule of this priority.
    Goto(u32),
    /// Refuses or drops: `unreachable`, `blackhole` or `prohibit`.
    Refuse(&'static str),
    /// Goes on with the next rule.
    Nothing,
}

impl Handle {
    /// All rules of a family, in the kernel's order.
    pub async fn all_rules(&self, family: Family) -> Result<Vec<ForeignRule>, NetlinkError> {
        let mut question = RuleMessage::default();
        question.header.family = message::family(family);
        let found = self.dump(Message::GetRule(question)).await?;
        let rule = |m: &Message| if let Message::NewRule(m) = m { Some(as_rule(m)) } else { None };
        Ok(found.iter().filter_map(rule).collect())
    }

    /// Deletes all rules of a family that lead to a table.
    pub async fn delete_rules_to(&self, family: Family, table: u32) -> Result<(), NetlinkError> {
        let mut question = RuleMessage::default();
        question.header.family = message::family(family);
        for found in self.dump(Message::GetRule(question)).await? {
            let Message::NewRule(rule) = found else { continue };
            if as_rule(&rule).action == ForeignAction::Lookup(table, None) {
                self.change(Message::DelRule(rule), 0).await?;
            }
        }
        Ok(())
    }

    /// All routes of a family in one table.
    pub async fn table_routes(
        &self,
        family: Family,
        table: u32,
    ) -> Result<Vec<ForeignRoute>, NetlinkError> {
        let routes = self.dumped_routes(family, Some(table)).await?;
        Ok(routes.into_iter().filter(|route| route.table == table).collect())
    }

    /// All routes of a family in all tables.
    pub async fn all_routes(&self, family: Family) -> Result<Vec<ForeignRoute>, NetlinkError> {
        self.dumped_routes(family, None).await
    }

    async fn dumped_routes(
        &self,
        family: Family,
        table: Option<u32>,
    ) -> Result<Vec<ForeignRoute>, NetlinkError> {
        let mut question = RouteMessage::default();
        question.header.address_family = message::family(family);
        question.attributes.extend(table.map(RouteAttribute::Table));
        let found = match self.dump(Message::GetRoute(question)).await {
            // There is no such table.
            Err(error) if error.is(&[ENOENT]) => return Ok(Vec::new()),
            found => found?,
        };
        let route = |m| if let Message::NewRoute(m) = m { Some(m) } else { None };
        let found: Vec<_> = found.into_iter().filter_map(route).collect();
        let names = self.names(found.iter().filter_map(output_device).collect())?;
        Ok(found.iter().filter_map(|message| as_route(message, &names)).collect())
    }
}

fn as_route(message: &RouteMessage, names: &BTreeMap<u32, String>) -> Option<ForeignRoute> {
    let header = &message.header;
    // Copies of the cache, which name no table.
    if header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let ipv4 = header.address_family == AddressFamily::Inet;
    let everything: IpAddr = if ipv4 { [0; 4].into() } else { [0; 16].into() };
    let (mut to, mut metric, mut gateway) = (everything, 0, None);
    for attribute in &message.attributes {
        if let RouteAttribute::Destination(address) = attribute {
            to = ip(address).unwrap_or(to);
        } else if let RouteAttribute::Priority(value) = attribute {
            metric = *value;
        } else if let RouteAttribute::Gateway(address) = attribute {
            gateway = ip(address);
        }
    }
    Some(ForeignRoute {
        table: table_of(message),
        to: Cidr::around(to, header.destination_prefix_length)?,
        metric,
        kind: kind(header.kind),
        gateway,
        dev: output_device(message).and_then(|index| names.get(&index).cloned()),
        protocol: u8::from(header.protocol),
    })
}

fn kind(kind: RouteType) -> &'static str {
    let names = [
        (RouteType::Local, "local"),
        (RouteType::Unreachable, "unreachable"),
        (RouteType::BlackHole, "blackhole"),
        (RouteType::Prohibit, "prohibit"),
        (RouteType::Throw, "throw"),
    ];
    names.into_iter().find(|(of, _)| *of == kind).map_or("", |(_, name)| name)
}

fn as_rule(message: &RuleMessage) -> ForeignRule {
    let header = &message.header;
    let (mut priority, mut table) = (0, u32::from(header.table));
    let (mut suppressed, mut goto, mut protocol) = (None, 0, RouteProtocol::Unspec);
    let (mut from, mut to, mut iif) = (None, None, None);
    let (mut fields, mut mark, mut mask) = (String::new(), 0, 0);
    let (mut is_for_sockets, is_inverted) = (false, header.flags.contains(RuleFlags::Invert));
    if header.tos != 0 {
        fields += &format!(" tos {:#x}", header.tos);
    }
    for attribute in &message.attributes {
        if let RuleAttribute::Priority(value) = attribute {
            priority = *value;
        } else if let RuleAttribute::Table(value) = attribute {
            table = *value;
        } else if let RuleAttribute::Source(address) = attribute {
            from = Cidr::around(*address, header.src_len);
        } else if let RuleAttribute::Destination(address) = attribute {
            to = Cidr::around(*address, header.dst_len);
        } else if let RuleAttribute::Iifname(name) = attribute {
            iif = Some(name.clone());
        } else if let RuleAttribute::IpProtocol(protocol) = attribute {
            fields += &format!(" ipproto {}", protocol_name(*protocol));
        } else if let RuleAttribute::SourcePortRange(range) = attribute {
            fields += &format!(" sport {}", port_range(*range));
        } else if let RuleAttribute::DestinationPortRange(range) = attribute {
            fields += &format!(" dport {}", port_range(*range));
        } else if let RuleAttribute::FwMark(value) = attribute {
            mark = *value;
        } else if let RuleAttribute::FwMask(value) = attribute {
            mask = *value;
        } else if let RuleAttribute::Goto(value) = attribute {
            goto = *value;
        } else if let RuleAttribute::Protocol(value) = attribute {
            protocol = *value;
        } else if let RuleAttribute::SuppressPrefixLen(value) = attribute {
            // The kernel reports -1 where nothing is suppressed.
            suppressed = Some(*value).filter(|len| *len <= 128);
        } else if let RuleAttribute::UidRange(users) = attribute {
            match users.start {
                0 => fields += &format!(" uidrange 0-{}", users.end),
                _ => is_for_sockets = true,
            }
        } else if let Some(dscp) = dscp(attribute) {
            fields += &format!(" dscp {dscp}");
        } else {
            is_for_sockets |= is_of_sockets(attribute);
        }
    }
    let action = match header.action {
        RuleAction::ToTable => ForeignAction::Lookup(table, suppressed),
        RuleAction::Goto => ForeignAction::Goto(goto),
        RuleAction::Unreachable => ForeignAction::Refuse("unreachable"),
        RuleAction::Blackhole => ForeignAction::Refuse("blackhole"),
        RuleAction::Prohibit => ForeignAction::Refuse("prohibit"),
        RuleAction::Unspec | RuleAction::Nop | RuleAction::Other(_) | _ => ForeignAction::Nothing,
    };
    let protocol = u8::from(protocol);
    let fields = fields.trim_start().to_owned();
    let mark = (mask != 0).then_some(Mark { value: mark, mask });
    ForeignRule {
        priority,
        from,
        to,
        iif,
        fields,
        mark,
        is_for_sockets,
        is_inverted,
        action,
        protocol,
    }
}

fn port_range(RulePortRange { start, end }: RulePortRange) -> String {
    if start == end { start.to_string() } else { format!("{start}-{end}") }
}

/// Name or number, as `ip rule` takes it.
fn protocol_name(protocol: IpProtocol) -> String {
    let names = [(IpProtocol::Icmp, "icmp"), (IpProtocol::Tcp, "tcp"), (IpProtocol::Udp, "udp")];
    let known = names.iter().find(|(of, _)| *of == protocol).map(|(_, name)| (*name).to_owned());
    known.unwrap_or_else(|| i32::from(protocol).to_string())
}

/// Differentiated services code point that a rule compares (Linux 6.13).
fn dscp(attribute: &RuleAttribute) -> Option<u8> {
    const FRA_DSCP: u16 = 25;
    let RuleAttribute::Other(value) = attribute else { return None };
    let mut dscp = [0];
    (value.kind() == FRA_DSCP && value.value_len() == dscp.len()).then(|| {
        value.emit_value(&mut dscp);
        dscp[0]
    })
}

/// True for an attribute that leaves all forwarded packets out.
fn is_of_sockets(attribute: &RuleAttribute) -> bool {
    matches!(
        attribute,
        RuleAttribute::TunId(_) | RuleAttribute::Oifname(_) | RuleAttribute::L3MDev(true)
    )
}
