//! IPs that Liqo's other modules read while Liqo's own networking, which would make them, is off: of
//! the API server and of Liqo's proxy to it, of each pod that runs in another cluster, and of the
//! address from which each peer's nodes are seen.
//!
//! Nothing but a Deployment is watched until Liqo's controller-manager runs beside. Without these IPs
//! its virtual kubelets leave pods pending, `liqoctl` cannot peer in-band, and an EndpointSlice with
//! one pod of a third cluster is not reflected at all.

mod desired;

use std::time::Duration;

use fabric_api::ipam::IP;
use fabric_index::placement::Plan;
use fabric_kube_client::ApiServer;
use fabric_kube_client::findings::{Findings, Reader};
use fabric_runtime::{Heartbeat, until};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::GATHER;
use super::liqo_repairs::LiqoRepairs;
use super::live::{Key, Live, Watched};
use super::objects::dynamic;
use super::shared_objects::SharedObjects;
use super::writer::{Desired, WriteError, Writer};
pub use desired::NETWORKING_OFF;
use desired::{Changes, Liqo, Wanted, changes, wanted};

/// Retry interval while the API server cannot be reached.
const RETRY: Duration = Duration::from_secs(5);
/// Time without Liqo's controller-manager after which its IPs are removed, and nothing is put back any more:
/// addresses that were mapped to peers are others after that, and an upgrade may replace its Deployment.
const ABSENT_FOR: Duration = Duration::from_secs(60);
/// Timeout for Liqo's uninstaller, which waits for five minutes itself.
const ENDS_WITHIN: Duration = Duration::from_secs(600);

pub(super) struct LiqoIps {
    /// The namespace of weft, which is that of Liqo, too.
    installation: String,
    live: Live,
    writer: Writer,
    /// Repairs are made from the same objects.
    repairs: LiqoRepairs,
    shared: SharedObjects,
    ends: watch::Sender<bool>,
    ending_since: Option<Instant>,
    /// All kinds are watched.
    is_open: bool,
    absent_since: Option<Instant>,
    due: Option<Instant>,
}

impl LiqoIps {
    /// Must be called within a tokio runtime; nothing is sent yet.
    pub(super) fn new(server: &ApiServer, identity: &str) -> Self {
        let installation = server.namespace.clone();
        let mut live = Live::watch(&server.client, &server.metrics, &[]);
        live.open(&[Watched::LiqoManager], &installation);
        Self {
            installation,
            live,
            writer: Writer::new(server),
            repairs: LiqoRepairs::new(server.client.clone(), identity),
            shared: SharedObjects::new(server.client.clone()),
            ends: watch::Sender::new(false),
            ending_since: None,
            is_open: false,
            absent_since: None,
            due: None,
        }
    }

    /// True while Liqo's uninstaller waits until there is neither Network nor IP.
    pub(super) fn ends(&self) -> watch::Receiver<bool> {
        self.ends.subscribe()
    }

    /// Runs until the controller is gone. Nothing is written before there is a plan.
    pub(super) async fn run(
        mut self,
        mut plan: watch::Receiver<Option<Plan>>,
        findings: &Findings,
        heartbeat: &Heartbeat,
    ) {
        let planned = async { plan.wait_for(Option::is_some).await.is_ok() };
        if !heartbeat.while_waiting(planned).await {
            return;
        }
        loop {
            self.reconcile(findings, heartbeat).await;
            heartbeat.while_waiting(self.changed(findings)).await;
        }
    }

    /// Waits until there is something to do.
    async fn changed(&mut self, findings: &Findings) {
        let due = [self.due, self.writer.again(), self.repairs.due(), self.shared.due()]
            .into_iter()
            .flatten()
            .min();
        loop {
            tokio::select! {
                news = self.live.next() => {
                    findings.set(Reader::LiqoIps, self.live.obstacles().cloned().collect());
                    if news {
                        return sleep(GATHER).await;
                    }
                }
                () = until(due) => return,
            }
        }
    }

    /// Repairs what Liqo has stored or deleted; makes, replaces and removes IPs. Failures are retried.
    async fn reconcile(&mut self, findings: &Findings, heartbeat: &Heartbeat) {
        self.due = None;
        let needed = [&[Watched::LiqoManager][..], &Watched::OF_LIQO_IPS].concat();
        if !self.live.has_listed(&needed) {
            return;
        }
        let liqo = self.liqo(Instant::now());
        self.ends.send_replace(liqo == Liqo::Ending);
        if liqo == Liqo::WithoutNetworking && !self.is_open {
            self.live.open(&Watched::OF_LIQO_IPS, &self.installation);
            self.live.open(&Watched::OF_LIQO_REPAIRS, &self.installation);
            self.is_open = true;
            return;
        }
        // Without definitions of Liqo's offloading there is nothing to repair.
        if liqo == Liqo::WithoutNetworking && self.live.is_whole() {
            self.repairs.reconcile(self.live.objects(), heartbeat).await;
        } else {
            self.repairs.forget();
        }
        findings.set_repairs(self.repairs.notes());
        match liqo {
            Liqo::WithoutNetworking => {
                self.shared.record(self.live.objects(), Instant::now());
                self.shared.remove_duplicates(self.live.objects(), heartbeat).await;
            }
            Liqo::Ending => {}
            Liqo::Absent => self.shared.restore(self.live.objects(), heartbeat).await,
            Liqo::WithNetworking => self.shared.forget(),
        }
        if !self.is_open || !self.is_due(liqo) {
            return;
        }
        let wanted = match liqo {
            Liqo::WithoutNetworking => wanted(self.live.objects(), &self.installation),
            // It makes them itself.
            Liqo::WithNetworking => return,
            Liqo::Absent | Liqo::Ending => Wanted::default(),
        };
        if liqo == Liqo::Absent {
            self.shared.forget();
        }
        self.writer.keep(|key| wanted.ips.contains_key(key));
        let changes = changes(self.live.objects(), &wanted);
        if let Err(error) = self.write(changes, heartbeat).await {
            tracing::debug!(%error, "IPs for Liqo are not as they should be; tried again");
            self.due = Some(Instant::now() + RETRY);
        }
    }

    /// One that does not end in time counts as absent.
    fn liqo(&mut self, now: Instant) -> Liqo {
        let liqo = Liqo::of(self.live.objects());
        if liqo != Liqo::Ending {
            self.ending_since = None;
            return liqo;
        }
        let until = *self.ending_since.get_or_insert(now) + ENDS_WITHIN;
        self.due = (now < until).then_some(until);
        if now < until { liqo } else { Liqo::Absent }
    }

    /// False while Liqo has been absent for a short time only.
    fn is_due(&mut self, liqo: Liqo) -> bool {
        if liqo != Liqo::Absent {
            self.absent_since = None;
            return true;
        }
        let due = *self.absent_since.get_or_insert_with(Instant::now) + ABSENT_FOR;
        let is_due = due <= Instant::now();
        self.due = (!is_due).then_some(due);
        is_due
    }

    async fn write(&mut self, changes: Changes, heartbeat: &Heartbeat) -> Result<(), WriteError> {
        for (key, uid) in &changes.delete {
            heartbeat.beat();
            match self.writer.delete(key, Some(uid)).await {
                // Its watch reports when it is gone.
                Ok(()) | Err(WriteError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let desired = changes.apply.iter().filter_map(desired);
        let desired: Vec<Desired> = desired.collect();
        let writes: Vec<&Desired> = desired.iter().collect();
        let written =
            self.writer.write_side_by_side(self.live.objects_mut(), &writes, heartbeat).await;
        written.into_iter().try_for_each(|one| match one {
            Err(WriteError::Refused { name, message }) => {
                tracing::warn!(name, reason = message, "an IP for Liqo; tried again");
                Ok(())
            }
            written => written,
        })
    }
}

fn desired(ip: &IP) -> Option<Desired> {
    dynamic(ip).and_then(|object| Desired::of(&object)).ok()
}

fn key(namespace: &str, name: &str) -> Key {
    Key::new(Watched::Ip, namespace, name)
}
