//! Leader election: one of several controllers works, the others wait for its Lease. Only the own
//! clock counts, and every write names the version that it replaces, so there are never two, but for one that was
//! cut off for seconds, until its next renewal.
//!
//! A holder whose process or node has ended is replaced sooner than its Lease runs out: candidates connect to it
//! twice a second, and one that has answered and does not any more, and renews nothing, has ended.
//!
//! The withdrawal cannot wait for a controller to end: it requests the Lease, and the holder
//! releases it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{ApiResource, DynamicObject};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::findings::Findings;
use crate::requests::{Requests, Target};
use crate::{ApiError, ApiServer};

/// Lease times, as in Liqo: it is lost after `DURATION` without renewal, its holder gives up after
/// `DEADLINE` of failed renewals, and renews every `PERIOD`. A renewal counts from when it was sent,
/// so that a slow answer is as good as a quick one and none is taken for longer than it holds.
const DURATION: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_secs(10);
const PERIOD: Duration = Duration::from_secs(2);
/// Minimum time between a renewal's answer and the next renewal.
const PAUSE: Duration = Duration::from_millis(500);

/// Time between two connections to the holder, and until one fails.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
const ASK_TIMEOUT: Duration = Duration::from_millis(700);
/// Connections between two looks at the Lease.
const ASKS: u32 = 2;
/// Failed connections after which the holder does not answer any more.
const MAX_UNANSWERED: u32 = 2;
/// Time without a renewal after which a holder that does not answer any more loses the Lease: longer than
/// [`PERIOD`], since only the way to it may be cut.
const UNRENEWED: Duration = Duration::from_millis(2300);

pub const NAME: &str = "weft-fabric-controller";
/// Annotation: why the holder cannot read all that it needs.
const OBSTACLES: &str = "fabric.weft.dev/obstacles";
/// Annotation: JSON list of what the holder repairs of other programs.
const REPAIRS: &str = "fabric.weft.dev/repairs";
/// Annotation: JSON object with faults that objects may not show themselves, by object.
const FAULTS: &str = "fabric.weft.dev/faults";
/// Faults in the annotation, at most: the Lease is written every two seconds.
const MAX_FAULTS: usize = 50;
/// Annotation: where the holder listens, as `IP:PORT`.
const ADDRESS: &str = "fabric.weft.dev/holder-address";
/// Annotation: identity that requests the Lease. All others keep out while it is renewed.
const WANTED_BY: &str = "fabric.weft.dev/wanted-by";

/// A candidate, and when it has been elected, the holder.
pub struct Election {
    requests: Requests,
    target: Target,
    identity: String,
    /// TCP address of this candidate.
    address: Option<SocketAddr>,
    /// Requests it instead of waiting until it is released.
    takes_over: bool,
    /// Another holder with an address.
    holder: Option<Holder>,
    /// The version that was seen last, and when it was seen first.
    seen: Option<(String, Instant)>,
    /// Holder logged last.
    logged: Option<String>,
    /// Lease as this one wrote it last.
    held: Option<Lease>,
    /// Time at which the last successful renewal was sent.
    renewed: Instant,
    /// Written into the Lease, for `weft status`.
    findings: Findings,
    /// True if another holds it.
    is_standby: watch::Sender<bool>,
}

/// Holder of the Lease, and the connections to its address.
#[derive(Debug)]
struct Holder {
    address: SocketAddr,
    has_answered: bool,
    /// Failed connections in a row.
    unanswered: u32,
}

impl Holder {
    fn has_ended(&self) -> bool {
        self.has_answered && self.unanswered >= MAX_UNANSWERED
    }

    async fn ask(&mut self) {
        let answers = timeout(ASK_TIMEOUT, TcpStream::connect(self.address)).await;
        match answers {
            Ok(Ok(_)) => (self.has_answered, self.unanswered) = (true, 0),
            Ok(Err(_)) | Err(_) => self.unanswered = self.unanswered.saturating_add(1),
        }
    }
}

impl Election {
    /// Programs of one `identity` are one holder: each may go on with what another has won.
    pub fn new(server: &ApiServer, identity: &str) -> Self {
        let name = (server.namespace.clone(), NAME.to_owned());
        Self {
            requests: server.requests(),
            target: Target::new(ApiResource::erase::<Lease>(&()), name),
            identity: identity.to_owned(),
            address: None,
            takes_over: false,
            holder: None,
            seen: None,
            logged: None,
            held: None,
            renewed: Instant::now(),
            findings: Findings::default(),
            is_standby: watch::Sender::default(),
        }
    }

    /// Other candidates connect to this address to find out whether this one lives.
    pub fn listening_at(self, address: Option<SocketAddr>) -> Self {
        Self { address, ..self }
    }

    /// The holder, if it runs, releases it within a few seconds.
    pub fn taking_over(self) -> Self {
        Self { takes_over: true, ..self }
    }

    /// Writes these into the Lease while it is held.
    pub fn reporting(self, findings: Findings) -> Self {
        Self { findings, ..self }
    }

    /// Returns true if another holds the Lease.
    pub fn is_standby(&self) -> watch::Receiver<bool> {
        self.is_standby.subscribe()
    }

    /// Returns when elected. Cancel safe.
    pub async fn won(&mut self) {
        loop {
            match within(DEADLINE, self.acquire()).await {
                Ok(Answer::Ours) => return tracing::info!(identity = self.identity, "elected"),
                Ok(Answer::Others) => _ = self.is_standby.send_replace(true),
                Ok(Answer::Contended) => {}
                Err(error) => tracing::debug!(%error, "cannot stand for election; tried again"),
            }
            self.wait().await;
        }
    }

    /// Waits before the Lease is looked at again.
    async fn wait(&mut self) {
        for _ in 0..ASKS {
            if let Some(holder) = &mut self.holder {
                holder.ask().await;
            }
            sleep(ASK_INTERVAL).await;
            if self.holder.as_ref().is_some_and(Holder::has_ended) {
                return;
            }
        }
    }

    /// Renews what was won, and returns when it is lost, or another requests it. Cancel safe.
    pub async fn lost(&mut self) {
        loop {
            sleep_until((self.renewed + PERIOD).max(Instant::now() + PAUSE)).await;
            let left = DEADLINE.saturating_sub(self.renewed.elapsed());
            match within(left, self.acquire()).await {
                Ok(Answer::Ours | Answer::Contended) => {}
                Ok(Answer::Others) => return,
                Err(error) => tracing::debug!(%error, "cannot renew the Lease"),
            }
            if self.renewed.elapsed() >= DEADLINE {
                return;
            }
        }
    }

    /// Lets the next one in at once.
    pub async fn release(&self) {
        let released = self.amend(|spec| {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
        });
        if let Err(error) = released.await {
            tracing::debug!(%error, "the Lease is not released; it runs out");
        }
    }

    /// Locks the Lease for that time against all but one of the same name: others are to be gone by
    /// then.
    pub async fn leave_locked(&self, time: Duration) -> Result<(), ApiError> {
        let seconds = i32::try_from(time.as_secs()).ok();
        self.amend(|spec| spec.lease_duration_seconds = seconds).await
    }

    /// Changes a Lease that is held.
    async fn amend(&self, change: impl Fn(&mut LeaseSpec)) -> Result<(), ApiError> {
        within(PERIOD, async {
            let found: Option<Lease> = self.requests.read(&self.target).await?;
            let Some(mut lease) = found else { return Ok(()) };
            if holder(&lease) == Some(&self.identity) {
                change(lease.spec.get_or_insert_default());
                self.requests.replace(&self.target, &lease).await?;
            }
            Ok(())
        })
        .await
    }

    async fn acquire(&mut self) -> Result<Answer, ApiError> {
        // The write itself fails if another has written since.
        if let Some(lease) = self.held.take()
            && self.write(lease).await? == Answer::Ours
        {
            return Ok(Answer::Ours);
        }
        let Some(mut lease) = self.requests.read::<Lease>(&self.target).await? else {
            return self.write(Lease::default()).await;
        };
        if self.may_take(&lease) {
            return self.write(lease).await;
        }
        if self.takes_over && wanted_by(&lease) != Some(&self.identity) {
            let annotations = lease.metadata.annotations.get_or_insert_default();
            annotations.insert(WANTED_BY.to_owned(), self.identity.clone());
            answer(self.requests.replace(&self.target, &lease).await)?;
        }
        Ok(Answer::Others)
    }

    async fn write(&mut self, lease: Lease) -> Result<Answer, ApiError> {
        let (mut lease, sent) = (self.taken(lease), Instant::now());
        let written = match lease.metadata.resource_version {
            Some(_) => self.requests.replace(&self.target, &lease).await,
            None => self.requests.create(&self.target, &lease).await,
        };
        if let Ok(written) = &written {
            lease.metadata = written.metadata.clone();
            (self.held, self.renewed) = (Some(lease), sent);
        }
        answer(written)
    }

    fn may_take(&mut self, lease: &Lease) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let first = match self.seen.take() {
            Some((known, first)) if known == version => first,
            Some(_) | None => Instant::now(),
        };
        self.seen = Some((version, first));
        let at = lease_address(lease);
        if self.holder.as_ref().map(|holder| holder.address) != at {
            let new = |address| Holder { address, has_answered: false, unanswered: 0 };
            self.holder = at.map(new);
        }
        let has_ended = self.holder.as_ref().is_some_and(Holder::has_ended);
        let expired =
            first.elapsed() >= lease_duration(lease) || has_ended && first.elapsed() >= UNRENEWED;
        if !self.takes_over && wanted_by(lease).is_some_and(|by| *by != self.identity) {
            return expired;
        }
        let Some(holder) = holder(lease) else { return true };
        if self.logged.as_ref() != Some(holder) && *holder != self.identity {
            tracing::info!(holder, "waiting; it has the Lease");
            self.logged = Some(holder.clone());
        }
        *holder == self.identity || is_restart(holder, &self.identity) || expired
    }

    fn taken(&self, mut lease: Lease) -> Lease {
        let now = Some(MicroTime(Timestamp::now()));
        let ours = holder(&lease) == Some(&self.identity);
        let spec = lease.spec.get_or_insert_default();
        if !ours {
            let before = spec.lease_transitions.unwrap_or_default();
            spec.lease_transitions = Some(before + i32::from(spec.acquire_time.is_some()));
            spec.acquire_time.clone_from(&now);
        }
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            renew_time: now,
            ..spec.clone()
        };
        let mut metadata = ObjectMeta { name: Some(NAME.to_owned()), ..lease.metadata };
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.remove(WANTED_BY);
        match self.address {
            Some(address) => _ = annotations.insert(ADDRESS.to_owned(), address.to_string()),
            None => _ = annotations.remove(ADDRESS),
        }
        let repairs = self.findings.repairs();
        let faults: BTreeMap<_, _> = self.findings.faults().into_iter().take(MAX_FAULTS).collect();
        for (key, text) in [
            (OBSTACLES, self.findings.text()),
            (REPAIRS, (!repairs.is_empty()).then(|| json!(repairs).to_string())),
            (FAULTS, (!faults.is_empty()).then(|| json!(faults).to_string())),
        ] {
            match text {
                Some(text) => _ = annotations.insert(key.to_owned(), text),
                None => _ = annotations.remove(key),
            }
        }
        Lease { metadata, spec: Some(spec) }
    }
}

/// Reason why the holder cannot read all that it needs, as it last wrote it.
pub fn obstacles(lease: &Lease) -> Option<&str> {
    let annotations = lease.metadata.annotations.as_ref()?;
    annotations.get(OBSTACLES).map(String::as_str)
}

/// Descriptions of what the holder repairs of other programs, as it last wrote them.
pub fn repairs(lease: &Lease) -> Vec<String> {
    written(lease, REPAIRS)
}

/// Faults that objects may not show themselves, by object, as the holder last wrote them.
pub fn faults(lease: &Lease) -> BTreeMap<String, String> {
    written(lease, FAULTS)
}

fn written<T: DeserializeOwned + Default>(lease: &Lease, annotation: &str) -> T {
    let annotations = lease.metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(annotation));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

fn wanted_by(lease: &Lease) -> Option<&String> {
    lease.metadata.annotations.as_ref()?.get(WANTED_BY)
}

/// Returns whether one is an earlier process of the same pod: identities are `POD_START`. Its container has one
/// process at a time.
fn is_restart(before: &str, own: &str) -> bool {
    let pods = before.rsplit_once('_').zip(own.rsplit_once('_'));
    pods.is_some_and(|((before, _), (own, _))| before == own)
}

fn lease_address(lease: &Lease) -> Option<SocketAddr> {
    lease.metadata.annotations.as_ref()?.get(ADDRESS)?.parse().ok()
}

/// Time without a renewal after which another may take it.
fn lease_duration(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    let duration = seconds.and_then(|seconds| seconds.try_into().ok()).map(Duration::from_secs);
    duration.unwrap_or_default().max(DURATION)
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}

async fn within<T>(
    bound: Duration,
    request: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let late = |_| ApiError::Timeout { seconds: bound.as_secs() };
    timeout(bound, request).await.map_err(late).flatten()
}

/// Result of a write that names the version it replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ours,
    /// Written or removed meanwhile, perhaps by an own request whose answer came too late.
    Contended,
    Others,
}

fn answer(written: Result<DynamicObject, ApiError>) -> Result<Answer, ApiError> {
    match written {
        Ok(_) => Ok(Answer::Ours),
        Err(ApiError::Refused { code: 404 | 409, .. }) => Ok(Answer::Contended),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::Value;
    use tower::service_fn;

    use super::*;

    /// API server with one Lease, which answers after `delay` milliseconds.
    fn server(delay: &Arc<AtomicU64>) -> Client {
        let (delay, stored) = (delay.clone(), Arc::new(std::sync::Mutex::new((0, Value::Null))));
        Client::new(
            service_fn(move |request: Request<Body>| {
                let (delay, stored) = (delay.clone(), stored.clone());
                async move {
                    let is_read = request.method() == "GET";
                    let body = request.into_body().collect_bytes().await.unwrap();
                    let (code, answer) = {
                        let (version, lease) = &mut *stored.lock().unwrap();
                        let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
                        let replaces = &sent["metadata"]["resourceVersion"];
                        let status = |code, reason| {
                            let message = format!("leases {NAME:?}: {reason}");
                            json!({"code": code, "reason": reason, "message": message})
                        };
                        if is_read && lease.is_null() {
                            (404, status(404, "NotFound"))
                        } else if !is_read && *replaces != lease["metadata"]["resourceVersion"] {
                            (409, status(409, "Conflict"))
                        } else if is_read {
                            (200, lease.clone())
                        } else {
                            *version += 1;
                            *lease = sent;
                            lease["metadata"]["resourceVersion"] = json!(version.to_string());
                            (200, lease.clone())
                        }
                    };
                    sleep(Duration::from_millis(delay.load(Ordering::Relaxed))).await;
                    let response = Response::builder().status(code);
                    let body = Body::from(answer.to_string().into_bytes());
                    Ok::<_, Infallible>(response.body(body).unwrap())
                }
            }),
            "liqo",
        )
    }

    fn election(client: &Client, identity: &str) -> Election {
        let (client, namespace, url) = (client.clone(), "liqo".to_owned(), String::new());
        let metrics = crate::StoreMetrics::default();
        let unreachable = watch::channel(false).1;
        Election::new(&ApiServer { client, namespace, url, unreachable, metrics }, identity)
    }

    #[tokio::test(start_paused = true)]
    async fn slow_server_does_not_end_a_lease() {
        let delay = Arc::new(AtomicU64::new(10));
        let client = server(&delay);
        let (mut one, mut other) = (election(&client, "one"), election(&client, "other"));
        one.won().await;
        delay.store(4500, Ordering::Relaxed);
        let both = async {
            tokio::select! {
                () = one.lost() => panic!("lost"),
                () = other.won() => panic!("two holders"),
            }
        };
        timeout(Duration::from_secs(300), both).await.unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn unanswered_lease_ends_before_next_holder() {
        let delay = Arc::new(AtomicU64::new(10));
        let client = server(&delay);
        let (mut one, mut other) = (election(&client, "one"), election(&client, "other"));
        one.won().await;
        delay.store(60_000, Ordering::Relaxed);
        let began = Instant::now();
        let lost = async {
            one.lost().await;
            began.elapsed()
        };
        let won = async {
            sleep(DEADLINE).await;
            delay.store(10, Ordering::Relaxed);
            other.won().await;
            began.elapsed()
        };
        let (lost, won) = tokio::join!(lost, won);
        assert!(lost >= DEADLINE - PERIOD && lost <= DEADLINE, "{lost:?}");
        assert!(won > lost, "{won:?}");
    }
}
