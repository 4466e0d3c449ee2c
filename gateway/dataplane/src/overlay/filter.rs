use std::io;
use std::time::Duration;

use netlink::nft::{self, Events, NftError, Table};
use netlink::{NetlinkError, Netns};

/// Name of our table, in either namespace.
const TABLE: &str = "weft";
const NO_RULES: &str = "table inet weft\ndelete table inet weft\n";

/// Rules of a node's own refusal, for the time until nodes have observed the loss and for the
/// connections that they let pass. A TCP segment of an established one is answered, too: a sender
/// that is notified that the network is unreachable retries at a steady rate without backoff (RFC
/// 6069), so it is back soon after the network is.
const REFUSE: &str = "table inet weft
delete table inet weft
table inet weft {
  chain refuse {
    type filter hook forward priority 0; policy accept;
    oifname != \"tunnel\" accept
    tcp flags & (fin | syn | rst | ack) == syn reject with tcp reset
    meta l4proto tcp reject with icmpx no-route
    reject with icmpx admin-prohibited
  }
}
";

/// The pod namespace has routes to the nodes only, so VXLAN from anyone else has no way back. That is
/// the strict reverse path filter, which IPv6 has in this form only.
const ONLY_NODES: &str = "table inet weft
delete table inet weft
table inet weft {
  chain strangers {
    type filter hook prerouting priority -300; policy accept;
    udp dport 4879 fib saddr . iif oif missing drop
  }
}
";

/// Until the kernel is asked for its notifications once more.
const REOPEN: Duration = Duration::from_secs(1);

/// A packet filter of ours: all of it is there, or nothing.
#[derive(Debug)]
pub struct Filter {
    netns: Netns,
    rules: &'static str,
    /// The table as it was left.
    left: Option<Table>,
    events: Option<Events>,
}

impl Filter {
    /// Refuses what nodes send to a peer that cannot be reached; only probes go out then. For the
    /// inner namespace. Must be called within a tokio runtime, like the other.
    pub fn refusal(netns: Netns) -> Result<Self, NetlinkError> {
        Self::new(netns, REFUSE)
    }

    /// Takes VXLAN from nodes only. For the pod namespace.
    pub fn only_nodes(netns: Netns) -> Result<Self, NetlinkError> {
        Self::new(netns, ONLY_NODES)
    }

    fn new(netns: Netns, rules: &'static str) -> Result<Self, NetlinkError> {
        let events = Some(Events::open(&netns, &[TABLE])?);
        Ok(Self { netns, rules, left: None, events })
    }

    /// Puts the filter in place, or takes it away; nothing if all is as wanted.
    pub async fn ensure(&mut self, wanted: bool) -> Result<(), NftError> {
        let (netns, rules, left) = (self.netns.clone(), self.rules, self.left.take());
        // `nft` takes some milliseconds, and probes shall not wait for it.
        let done = tokio::task::spawn_blocking(move || ensure(&netns, rules, left, wanted)).await;
        self.left = done.map_err(|ended| NftError::Start(io::Error::other(ended)))??;
        Ok(())
    }

    /// Returns after something of the table changed.
    pub async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            tokio::time::sleep(REOPEN).await;
            self.events = Events::open(&self.netns, &[TABLE]).ok();
            return;
        };
        if let Err(error) = events.changed().await {
            tracing::warn!(%error, "lost the packet filter's notifications");
            self.events = None;
        }
    }
}

fn ensure(
    netns: &Netns,
    rules: &str,
    left: Option<Table>,
    wanted: bool,
) -> Result<Option<Table>, NftError> {
    let have = nft::table(netns, TABLE)?;
    if have == left && have.is_some() == wanted {
        return Ok(left);
    }
    nft::run(netns, if wanted { rules } else { NO_RULES })?;
    nft::table(netns, TABLE)
}
