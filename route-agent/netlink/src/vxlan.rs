//! VXLAN devices of a namespace, whatever their names.

use fabric_primitives::Mac;
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netplan::{Family, Vxlan};

use crate::attributes::mtu;
use crate::links::{as_link, link_info, no_stats};
use crate::{Handle, NetlinkError, message};

impl Handle {
    /// VXLAN devices with the VNI and UDP port of `want` and a socket in this namespace, by name:
    /// the kernel refuses another one beside them.
    ///
    /// A device without weft's alias has VNI 0 in the result. One whose alias names the other
    /// family is no obstacle and left out.
    pub async fn vxlans_like(&self, want: &Vxlan) -> Result<Vec<(String, Vxlan)>, NetlinkError> {
        let kind = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan)]);
        let found = self.dump(Message::GetLink(message::link(0, vec![kind, no_stats()]))).await?;
        let key = [InfoVxlan::Id(want.vni), InfoVxlan::Port(want.port)];
        // The kernel filters by kind, but one before 4.6 does not.
        let has_key = |link: &&LinkMessage| key.iter().all(|v| vxlan_data(link).contains(v));
        let links = found.iter().filter_map(as_link).filter(has_key);
        let devices = links.map(|link| (link_info(link).name, as_vxlan(link)));
        let is_obstacle =
            |device: &Vxlan| !device.elsewhere && (device.vni == 0 || device.family == want.family);
        Ok(devices.filter(|(_, device)| is_obstacle(device)).collect())
    }
}

/// Any device that is not a VXLAN device made by us has VNI 0, so that it never matches a desired
/// one.
pub(crate) fn as_vxlan(link: &LinkMessage) -> Vxlan {
    let mut vxlan = Vxlan {
        vni: 0,
        port: 0,
        family: Family::Ipv4,
        elsewhere: false,
        checksum: true,
        mtu: mtu(link),
        mac: Mac([0; 6]),
        up: link.header.flags.contains(LinkFlags::Up),
    };
    let mut mark = None;
    for attribute in &link.attributes {
        if let LinkAttribute::IfAlias(alias) = attribute {
            let marks = |family: &Family| *alias == message::vxlan_alias(*family);
            mark = [Family::Ipv4, Family::Ipv6].into_iter().find(marks);
        } else if let LinkAttribute::Address(bytes) = attribute {
            vxlan.mac = <[u8; 6]>::try_from(bytes.as_slice()).map_or(vxlan.mac, Mac);
        } else if let LinkAttribute::LinkNetNsId(_) = attribute {
            vxlan.elsewhere = true;
        }
    }
    let Some(family) = mark else { return vxlan };
    vxlan.family = family;
    for value in vxlan_data(link) {
        if let InfoVxlan::Id(vni) = value {
            vxlan.vni = *vni;
        } else if let InfoVxlan::Port(port) = value {
            vxlan.port = *port;
        } else if let InfoVxlan::UDPCsum(checksum) = value
            && family == Family::Ipv4
        {
            vxlan.checksum = *checksum;
        }
    }
    vxlan
}

/// Empty for a device of another kind.
fn vxlan_data(link: &LinkMessage) -> &[InfoVxlan] {
    for attribute in &link.attributes {
        if let LinkAttribute::LinkInfo(info) = attribute {
            return info.iter().find_map(data_of).unwrap_or_default();
        }
    }
    &[]
}

fn data_of(info: &LinkInfo) -> Option<&[InfoVxlan]> {
    if let LinkInfo::Data(InfoData::Vxlan(data)) = info { Some(data) } else { None }
}
