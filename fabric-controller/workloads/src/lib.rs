//! All that only Kubernetes has: gateways as Deployments with their Services and rights, Services
//! of IPs, pods, the labels that Liqo's tools look for in Secrets and ForeignClusters, IPs that
//! Liqo's other modules read, and Events.
//!
//! [`Kubernetes`] receives a [`Plan`] and publishes [`Placements`]; `live` is the observed state,
//! `objects` and `services` the desired one (pure), `writer` writes what differs, `place` finds
//! where gateways run (pure), `pods` the pods with addresses outside of their nodes' CIDRs.

mod absence;
mod active_labels;
mod endpoint;
mod events;
mod foreign_clusters;
mod kept_fields;
mod liqo_ips;
mod liqo_repairs;
mod liqo_template;
mod live;
mod objects;
mod place;
mod pods;
pub mod report;
mod rights;
mod secrets;
mod services;
mod shared_objects;
#[cfg(test)]
mod slow_server;
mod template;
mod waves;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fabric_api::check::Fault;
use fabric_kube_client::ApiServer;
use fabric_objects::ObjectRef;
use fabric_runtime::{Heartbeat, until};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use absence::Absence;
use events::Events;
use fabric_index::placement::{Placement, Placements, Plan, PlannedGateway};
use fabric_kube_client::findings::{Findings, Reader};
use foreign_clusters::ForeignClusters;
use liqo_ips::LiqoIps;
use live::{Key, Live, Watched};
use place::World;
use pods::{GatewayPod, Pods};
use secrets::Secrets;
use template::{Origin, Template};
use waves::Waves;
use writer::{Desired, WriteError, Writer};

pub use active_labels::keep_active_labels;
pub use foreign_clusters::clear as clear_foreign_clusters;
pub use liqo_ips::NETWORKING_OFF;
pub use liqo_template::is_argument_of_liqo;
pub use live::{SLICE_OF, SLICE_OF_WEFT};

/// Time to collect events: those of a Deployment are a dozen within a second.
const GATHER: Duration = Duration::from_millis(30);
/// Backoff after the API server could not be reached.
const RETRY: Duration = Duration::from_secs(1);

/// The cluster's nodes, by name.
pub type Nodes = Arc<BTreeMap<String, Node>>;

/// Plans to this part of the program, and placements from it.
#[derive(Debug)]
pub struct Exchange {
    /// `None` until all are known that were there at the start.
    pub nodes: watch::Sender<Option<Nodes>>,
    pub plan: watch::Sender<Option<Plan>>,
    /// `None` until all is known that was there at the start.
    pub placements: watch::Receiver<Option<Placements>>,
    /// True while Liqo's uninstaller waits until there is neither Network nor IP.
    pub liqo_ends: watch::Receiver<bool>,
}

/// Makes gateways run, and what Liqo's other modules read. Each has a loop of its own, so that no pod of a
/// gateway waits for writes about something else.
pub struct Kubernetes {
    gateways: Gateways,
    foreign_clusters: ForeignClusters,
    liqo_ips: LiqoIps,
}

struct Gateways {
    /// The namespace of weft itself, where its templates are.
    installation: String,
    live: Live,
    nodes: Nodes,
    changed_nodes: watch::Receiver<Option<Nodes>>,
    pods: Pods,
    writer: Writer,
    waves: Waves,
    events: Events,
    secrets: Secrets,
    absence: Absence,
    findings: Findings,
    heartbeat: Heartbeat,
    plan: watch::Receiver<Option<Plan>>,
    placements: watch::Sender<Option<Placements>>,
    /// Desired objects of the gateways, rendered once.
    wanted: BTreeMap<ObjectRef, Wanted>,
    retry: Option<Instant>,
}

/// Faults of gateways and of the Services of IPs.
type Faults = BTreeMap<ObjectRef, Vec<Fault>>;

/// Reason to run the loop again.
enum News {
    /// Addresses of pods outside of their nodes' CIDRs: nothing is made of them here.
    Addresses,
    /// Pods or objects of gateways, or nodes.
    Objects,
    /// The plan, or the time of something that was put off.
    Plan,
    /// The controller is gone.
    Ended,
}

struct Wanted {
    gateway: PlannedGateway,
    template: Result<Origin, Fault>,
    /// Uid of its ServiceAccount, once that is there.
    account: Option<String>,
    objects: Result<Vec<Desired>, Fault>,
    /// The user has edited this gateway, and nothing that all of them have in common.
    is_edited: bool,
}

impl Kubernetes {
    /// `identity` names this program in Events; `wave` is how many of all gateways are replaced at a time,
    /// in percent. Must be called within a tokio runtime; nothing is
    /// sent yet.
    pub fn new(
        server: ApiServer,
        identity: &str,
        wave: u8,
        findings: Findings,
        heartbeat: Heartbeat,
    ) -> (Self, Exchange) {
        let writer = Writer::new(&server);
        let liqo_ips = LiqoIps::new(&server, identity);
        let liqo_ends = liqo_ips.ends();
        let ApiServer { client, namespace: installation, metrics, .. } = server;
        let (nodes_sender, changed_nodes) = watch::channel(None);
        let (plan_sender, plan) = watch::channel(None);
        let (placements, placements_receiver) = watch::channel(None);
        let foreign_clusters = ForeignClusters::new(client.clone(), &metrics);
        let gateways = Gateways {
            installation,
            live: Live::watch(&client, &metrics, &Watched::OF_GATEWAYS),
            nodes: Nodes::default(),
            changed_nodes,
            pods: Pods::watch(&client, &metrics),
            writer,
            waves: Waves::new(wave),
            findings,
            heartbeat,
            events: Events::new(client.clone(), identity),
            secrets: Secrets::new(client),
            absence: Absence::default(),
            plan,
            placements,
            wanted: BTreeMap::new(),
            retry: None,
        };
        let kubernetes = Self { gateways, foreign_clusters, liqo_ips };
        let placements = placements_receiver;
        (kubernetes, Exchange { nodes: nodes_sender, plan: plan_sender, placements, liqo_ends })
    }

    /// Runs until the controller is gone.
    pub async fn run(self) {
        let Self { gateways, foreign_clusters, liqo_ips } = self;
        let (heartbeat, plan) = (gateways.heartbeat.clone(), gateways.plan.clone());
        let findings = gateways.findings.clone();
        tokio::select! {
            () = gateways.run() => {}
            () = foreign_clusters.run(plan.clone(), &heartbeat) => {}
            () = liqo_ips.run(plan, &findings, &heartbeat) => {}
        }
    }
}

impl Gateways {
    async fn run(mut self) {
        let heartbeat = self.heartbeat.clone();
        heartbeat.while_waiting(self.read()).await;
        let mut faults = Faults::new();
        self.publish(&faults);
        loop {
            match heartbeat.while_waiting(self.changed()).await {
                News::Addresses => {
                    self.publish_addresses();
                    continue;
                }
                // Nodes wait for a gateway's pod, not for what is written below.
                News::Objects => self.publish(&faults),
                News::Plan => {}
                News::Ended => return,
            }
            let plan = self.plan.borrow_and_update().clone();
            let Some(plan) = plan else { continue };
            faults = self.reconcile(&plan, faults).await;
            self.secrets.complete(&plan.secrets, &heartbeat).await;
            self.events.emit_new(&plan.problems, &heartbeat).await;
            self.publish(&faults);
        }
    }

    /// Waits until all that is there is known.
    async fn read(&mut self) {
        while !self.live.is_whole() || !self.pods.is_whole() || !self.take_nodes() {
            tokio::select! {
                _ = self.live.next() => {}
                _ = self.pods.next(&self.nodes) => {}
                Ok(()) = self.changed_nodes.changed() => {}
            }
            self.report_obstacles();
        }
    }

    /// True if they are known.
    fn take_nodes(&mut self) -> bool {
        let Some(nodes) = self.changed_nodes.borrow_and_update().clone() else { return false };
        self.nodes = nodes;
        self.pods.nodes_changed();
        true
    }

    fn report_obstacles(&self) {
        let obstacles = self.live.obstacles().chain(self.pods.obstacles());
        self.findings.set(Reader::Gateways, obstacles.cloned().collect());
    }

    /// Waits until there is something to do.
    async fn changed(&mut self) -> News {
        let due = self.due();
        loop {
            let addresses_due = self.pods.due(Instant::now());
            tokio::select! {
                news = self.live.next() => {
                    self.report_obstacles();
                    if news { break }
                }
                news = self.pods.next(&self.nodes) => {
                    self.report_obstacles();
                    if news { break }
                }
                Ok(()) = self.changed_nodes.changed() => if self.take_nodes() { break },
                plan = self.plan.changed() => {
                    return if plan.is_ok() { News::Plan } else { News::Ended };
                }
                () = until(due) => return News::Plan,
                () = until(addresses_due) => return News::Addresses,
            }
        }
        let gathered = sleep(GATHER);
        tokio::pin!(gathered);
        loop {
            tokio::select! {
                _ = self.live.next() => {}
                _ = self.pods.next(&self.nodes) => {}
                () = &mut gathered => return News::Objects,
            }
        }
    }

    fn due(&self) -> Option<Instant> {
        self.plan.borrow().as_ref()?;
        // Nothing else can be done while the API server cannot be reached.
        self.retry.or_else(|| {
            let due = [
                self.writer.again(),
                self.secrets.due(),
                self.absence.due(Instant::now()),
                self.events.again(),
                self.pods.start_due(Timestamp::now()),
            ];
            due.into_iter().flatten().min()
        })
    }

    fn publish(&mut self, faults: &Faults) {
        let pods: Vec<&GatewayPod> = self.pods.of_gateways().collect();
        let world = World { live: self.live.objects(), nodes: &self.nodes, pods: &pods };
        let mut of = place::placements(world);
        for (gateway, faults) in faults {
            let uid = self.wanted.get(gateway).map(|wanted| wanted.gateway.object.uid());
            let placement = of.entry(gateway.clone()).or_default();
            if uid.is_some_and(|uid| placement.uid != uid) {
                let uid = uid.unwrap_or_default().to_owned();
                *placement = Placement { uid, ..Placement::default() };
            }
            placement.faults.clone_from(faults);
        }
        for (gateway, placement) in &mut of {
            placement.pod_fault = self.pods.start_fault(gateway, Timestamp::now());
        }
        self.absence.mark(&mut of, Instant::now());
        let pods = self.pods.addresses(&self.nodes, Instant::now()).clone();
        let placements = Placements { of, pods };
        self.placements.send_if_modified(|before| {
            let news = before.as_ref() != Some(&placements);
            *before = Some(placements);
            news
        });
    }

    fn publish_addresses(&mut self) {
        let pods = self.pods.addresses(&self.nodes, Instant::now());
        self.placements.send_if_modified(|placements| {
            let placements = placements.get_or_insert_default();
            let news = placements.pods != *pods;
            placements.pods.clone_from(pods);
            news
        });
    }

    /// Writes the desired objects. What is wrong with a gateway or an IP is given back; of what could not be tried,
    /// what was wrong before.
    async fn reconcile(&mut self, plan: &Plan, before: Faults) -> Faults {
        self.retry = None;
        self.render(plan);
        let mut faults = Faults::new();
        let mut made = self.make(plan, &mut faults).await;
        // With the uids of accounts that were made just now.
        if made.is_ok() && self.render(plan) {
            faults.clear();
            made = self.make(plan, &mut faults).await;
        }
        let Err(error) = made else { return faults };
        tracing::debug!(%error, "tried again soon");
        self.retry = Some(Instant::now() + RETRY);
        before.into_iter().chain(faults).collect()
    }

    async fn make(&mut self, plan: &Plan, faults: &mut Faults) -> Result<(), WriteError> {
        self.write_readers(plan).await?;
        self.write_all(faults).await?;
        // Before Services are written: that of an IP's namesake would be in the way.
        if plan.whole {
            self.sweep(plan).await?;
        }
        self.write_services(plan, faults).await
    }

    /// Returns true if anything is rendered anew.
    fn render(&mut self, plan: &Plan) -> bool {
        let mut is_new = false;
        self.wanted.retain(|gateway, _| plan.gateways.contains_key(gateway));
        for (reference, gateway) in &plan.gateways {
            let template = template::template_of(gateway, self.live.objects(), &self.installation);
            let origin = template.as_ref().map(|of| of.origin.clone()).map_err(Fault::clone);
            let same = self.wanted.get(reference);
            let account = place::account_uid(self.live.objects(), gateway);
            let is_same = |of: &Wanted| {
                of.gateway == *gateway && of.template == origin && of.account == account
            };
            if same.is_some_and(is_same) {
                continue;
            }
            let objects =
                template.and_then(|template| objects_of(gateway, &template, account.as_deref()));
            let is_edited = same.is_some_and(|known| known.template == origin);
            let gateway = gateway.clone();
            let wanted = Wanted { gateway, template: origin, account, objects, is_edited };
            self.wanted.insert(reference.clone(), wanted);
            is_new = true;
        }
        is_new
    }

    /// Lets gateways read GatewayRecords. Their accounts may follow.
    async fn write_readers(&mut self, plan: &Plan) -> Result<(), WriteError> {
        let key = Key::new(Watched::RecordReaders, "", rights::RECORD_READERS);
        // The release has it: nothing else may make it.
        let Some(there) = self.live.objects().get(&key).cloned() else { return Ok(()) };
        let known = there.try_parse::<ClusterRoleBinding>().ok().and_then(|of| of.subjects);
        let known = known.filter(|_| !plan.whole).unwrap_or_default();
        let readers = rights::record_readers(plan.gateways.keys(), known);
        let Ok(readers) = objects::dynamic(&readers).and_then(|of| Desired::of(&of)) else {
            return Ok(());
        };
        match self.writer.write(self.live.objects_mut(), &readers).await {
            Err(error @ WriteError::Refused { .. }) => {
                tracing::debug!(%error, "gateways get their configs in whole");
                Ok(())
            }
            written => written,
        }
    }

    /// Writes the objects of all gateways, first those that others of the same gateway refer to.
    async fn write_all(&mut self, faults: &mut Faults) -> Result<(), WriteError> {
        let mut all = Vec::new();
        for (gateway, wanted) in &self.wanted {
            match &wanted.objects {
                Ok(objects) => {
                    all.extend(objects.iter().map(|object| (gateway, object, wanted.is_edited)));
                }
                Err(fault) => faults.entry(gateway.clone()).or_default().push(fault.clone()),
            }
        }
        let (writer, live) = (&mut self.writer, self.live.objects_mut());
        let (referring, mut due): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, object, _)| object.key.of.refers_to_others());
        let (mut waiting, mut next): (Vec<_>, Vec<_>) =
            referring.into_iter().partition(|(_, object, _)| object.key.of == Watched::Deployment);
        waiting.retain(|(_, deployment, _)| !writer.is_there(live, deployment));
        while !due.is_empty() {
            let writes: Vec<_> = due.iter().map(|(_, object, _)| *object).collect();
            let written = writer.write_side_by_side(live, &writes, &self.heartbeat).await;
            for ((gateway, ..), written) in due.into_iter().zip(written) {
                tolerate(written, gateway, faults)?;
            }
            due = std::mem::take(&mut next);
            due.extend(self.waves.next(live, &mut waiting, |of| (&of.1.key, of.2)));
        }
        if !waiting.is_empty() {
            tracing::info!(waiting = waiting.len(), "gateways are replaced in waves");
        }
        Ok(())
    }

    async fn write_services(&mut self, plan: &Plan, faults: &mut Faults) -> Result<(), WriteError> {
        for (reference, ip) in &plan.services {
            let objects = services::objects_of(ip).unwrap_or_default();
            for object in objects.iter().filter_map(|object| Desired::of(object).ok()) {
                let written = self.writer.write_own(self.live.objects_mut(), &object).await;
                self.heartbeat.beat();
                tolerate(written, reference, faults)?;
            }
        }
        Ok(())
    }

    /// Removes what belongs to no gateway that is to run, and to no IP that is to have a Service.
    async fn sweep(&mut self, plan: &Plan) -> Result<(), WriteError> {
        let names: BTreeSet<(String, String)> = plan
            .gateways
            .keys()
            .map(|g| (g.namespace.clone().unwrap_or_default(), format!("gw-{}", g.name)))
            .collect();
        let is_wanted = |key: &Key| names.contains(&(key.namespace.clone(), key.name.clone()));
        let live = self.live.objects();
        let made = Watched::MADE.into_iter().flat_map(|kind| live.all(kind));
        let stale =
            made.filter(|(key, object)| !is_wanted(key) && place::gateway_of(object).is_some());
        let exposed = Watched::EXPOSED.into_iter().flat_map(|kind| live.all(kind));
        let stale = stale.chain(exposed.filter(|(_, object)| services::is_stale(object, plan)));
        // Objects that are ending already may take their time.
        let stale = stale.filter(|(_, object)| object.metadata.deletion_timestamp.is_none());
        let stale: BTreeMap<Key, Option<String>> =
            stale.map(|(key, object)| (key.clone(), object.metadata.uid.clone())).collect();
        self.waves.keep(is_wanted);
        self.writer.keep(|key| {
            is_wanted(key)
                || key.of == Watched::RecordReaders
                || services::is_wanted(key, plan)
                || stale.contains_key(key)
        });
        for (key, uid) in stale {
            // A refused deletion does not stop the others.
            let removed = self.writer.delete(&key, uid.as_deref()).await;
            self.heartbeat.beat();
            if let Err(unreachable @ WriteError::Unreachable(_)) = removed {
                return Err(unreachable);
            }
        }
        Ok(())
    }
}

fn objects_of(
    gateway: &PlannedGateway,
    template: &Template<'_>,
    account: Option<&str>,
) -> Result<Vec<Desired>, Fault> {
    let rendered = template::rendered(gateway, template)?;
    objects::check_name(gateway, &rendered)?;
    let objects = objects::objects_of(gateway, rendered, account);
    let objects = objects.and_then(|objects| objects.iter().map(Desired::of).collect());
    objects.map_err(|error| Fault { field: String::new(), message: error.to_string() })
}

/// Records a refused write as a fault of its object; the others go on.
fn tolerate(
    written: Result<(), WriteError>,
    of: &ObjectRef,
    faults: &mut Faults,
) -> Result<(), WriteError> {
    let Err(refused @ WriteError::Refused { .. }) = written else { return written };
    let fault = Fault { field: String::new(), message: refused.to_string() };
    faults.entry(of.clone()).or_default().push(fault);
    Ok(())
}

#[cfg(test)]
mod tests;
