use std::io;

use futures::StreamExt;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;

use crate::{Netns, NetnsError};

/// The tables of one network namespace, over a netlink socket opened inside it.
///
/// Must be opened within a tokio runtime; a current-thread one is enough.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: rtnetlink::Handle,
    pub(crate) netns: Netns,
    /// Namespace in which VXLAN devices that are `elsewhere` are made.
    pub(crate) underlay: Option<Box<Self>>,
}

#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    #[error(transparent)]
    Namespace(#[from] NetnsError),
    #[error("cannot open a netlink socket")]
    Open(#[source] io::Error),
    #[error("the netlink connection has ended")]
    Ended,
    /// Error returned by the kernel.
    #[error(transparent)]
    Refused(io::Error),
    #[error("there is no device {0}")]
    NoDevice(String),
    #[error("cannot access {path}")]
    Sysctl { path: String, source: io::Error },
    #[error("cannot have a timer")]
    Timer(#[source] io::Error),
    #[error("no underlay namespace was given to make {0} in")]
    NoUnderlay(String),
}

/// Attempts at a dump that a change of the table interrupts.
const DUMP_TRIES: usize = 5;

impl Handle {
    pub fn open(netns: &Netns) -> Result<Self, NetlinkError> {
        let runtime = tokio::runtime::Handle::current();
        let (connection, requests, _) = netns
            .run(|| {
                let _entered = runtime.enter();
                rtnetlink::new_connection_with_strict_check()
            })?
            .map_err(NetlinkError::Open)?;
        // It ends when the last handle is dropped.
        tokio::spawn(connection);
        Ok(Self { requests, netns: netns.clone(), underlay: None })
    }

    /// Makes VXLAN devices that are wanted `elsewhere` in `underlay` and moves them here.
    pub fn over(self, underlay: Self) -> Self {
        Self { underlay: Some(Box::new(underlay)), ..self }
    }

    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Requests a change from the kernel. `flags` determine the treatment of existing objects.
    pub(crate) async fn change(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        self.request(message, NLM_F_ACK | flags).await.map(|_| ())
    }

    /// Asks for one thing.
    pub(crate) async fn get(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        self.request(message, 0).await.map(|(found, _)| found)
    }

    /// Asks for a whole table. The kernel's filters apply.
    pub(crate) async fn dump(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        let mut tries = 0;
        loop {
            let (found, interrupted) = self.request(message.clone(), NLM_F_DUMP).await?;
            tries += 1;
            if !interrupted || tries == DUMP_TRIES {
                return Ok(found);
            }
        }
    }

    /// Returns the answers, and whether the table changed while they were gathered.
    async fn request(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), NetlinkError> {
        let mut request = NetlinkMessage::from(message);
        request.header.flags = NLM_F_REQUEST | flags;
        let mut answers =
            self.requests.clone().request(request).map_err(|_| NetlinkError::Ended)?;
        let (mut found, mut interrupted) = (Vec::new(), false);
        while let Some(answer) = answers.next().await {
            interrupted |= answer.header.flags & NLM_F_DUMP_INTR != 0;
            if let NetlinkPayload::InnerMessage(message) = answer.payload {
                found.push(message);
            } else if let NetlinkPayload::Error(error) = answer.payload
                && error.code.is_some()
            {
                return Err(NetlinkError::Refused(error.to_io()));
            }
        }
        Ok((found, interrupted))
    }
}

impl NetlinkError {
    /// The kernel's error number, such as `libc::ENOENT`.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused(error)
            | Self::Sysctl { source: error, .. }
            | Self::Open(error)
            | Self::Timer(error) => error.raw_os_error(),
            Self::Namespace(_) | Self::Ended | Self::NoDevice(_) | Self::NoUnderlay(_) => None,
        }
    }

    /// The kernel has an object already that excludes the new one.
    pub fn is_existing(&self) -> bool {
        self.is(&[libc::EEXIST])
    }

    pub(crate) fn is(&self, errnos: &[i32]) -> bool {
        self.errno().is_some_and(|errno| errnos.contains(&errno))
    }
}
