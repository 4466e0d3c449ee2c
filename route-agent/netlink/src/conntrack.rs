//! Tracked connections, over ctnetlink.

use std::io;
use std::net::IpAddr;

use crate::nfnetlink::{Kind, Nfnetlink, attribute, attributes, put};
use crate::{NetlinkError, Netns};

/// A tracked connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Ends of its first packet, as it came.
    pub original: Tuple,
    /// Ends of an answer, as it comes: what differs is translated.
    pub reply: Tuple,
    /// Attributes that identify the flow to the kernel.
    name: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// Source and destination port, if it is UDP.
    pub udp_ports: Option<[u16; 2]>,
}

const GET: Kind = Kind(1, 1);
const DELETE: Kind = Kind(1, 2);
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const NESTED: u16 = 1 << 15;

/// Deletes the connections that are `stale`, and returns how many those were.
pub fn delete_stale(
    netns: &Netns,
    stale: impl Fn(&Flow) -> bool + Send,
) -> Result<usize, NetlinkError> {
    netns.run(|| delete(stale))?.map_err(NetlinkError::Refused)
}

fn delete(stale: impl Fn(&Flow) -> bool) -> io::Result<usize> {
    let socket = Nfnetlink::open()?;
    let mut found = Vec::new();
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        let mut keep = |body: &[u8]| {
            if let Some(flow) = parse(body).filter(|flow| stale(flow)) {
                found.push((family, flow));
            }
        };
        socket.for_each(GET, family, &mut keep)?;
    }
    for (family, flow) in &found {
        match socket.ask(DELETE, *family, &flow.name) {
            // It has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            done => drop(done?),
        }
    }
    Ok(found.len())
}

fn parse(body: &[u8]) -> Option<Flow> {
    let original = attribute(body, TUPLE_ORIGINAL)?;
    let mut name = Vec::new();
    put(&mut name, TUPLE_ORIGINAL | NESTED, original);
    for (kind, value) in attributes(body).filter(|(kind, _)| [ID, ZONE].contains(kind)) {
        put(&mut name, kind, value);
    }
    Some(Flow { original: tuple(original)?, reply: tuple(attribute(body, TUPLE_REPLY)?)?, name })
}

fn tuple(body: &[u8]) -> Option<Tuple> {
    let ip = attribute(body, 1)?;
    let v4 = |kind| Some(IpAddr::from(<[u8; 4]>::try_from(attribute(ip, kind)?).ok()?));
    let v6 = |kind| Some(IpAddr::from(<[u8; 16]>::try_from(attribute(ip, kind)?).ok()?));
    let protocol = attribute(body, 2)?;
    let is_udp = attribute(protocol, 1)? == [libc::IPPROTO_UDP as u8];
    let port = |kind| Some(u16::from_be_bytes(attribute(protocol, kind)?.try_into().ok()?));
    Some(Tuple {
        source: v4(1).or_else(|| v6(3))?,
        destination: v4(2).or_else(|| v6(4))?,
        udp_ports: if is_udp { Some([port(2)?, port(3)?]) } else { None },
    })
}
