//! Pods and Services of an offloaded namespace while both clusters are taken over from Liqo's network, one after
//! the other, and given back. Liqo clears networking in a ForeignCluster while neither network is on, and its
//! controllers store addresses of pods as they are if they look at it then.
//!
//! ```text
//!   rome (consumer)                                  milan (provider)
//!   near, far's shadow -- rome-1 --+--[ switch ]--+-- milan-1 -- far
//! ```

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use weft_tests::kubernetes::{Image, Object};
use weft_tests::{Kubernetes, Pod, stays_so, wait_until};

use super::guide::Guide;
use super::{Change, Kept, OF_PEERING, OUTAGE, Peers, granted, play_on};
use crate::beside_liqo::{
    DEMO, addresses, as_seen, label_head, leads, offload, peer, pods_reach, reaches_home,
    service_of,
};
use crate::calls::list;
use crate::pair::{SOON, TIMEOUT};
use crate::stage::{each, note, note_time, step};

const IPS: &str = "ips.ipam.liqo.io";
/// Time from the end of a change in which all is reached again and no address is unmapped.
const REACHED: Duration = Duration::from_secs(30);
/// Longer than Liqo takes to store what it reads of a ForeignCluster, and weft to find it.
const SETTLED: Duration = Duration::from_secs(10);
/// Time between two looks at what is stored.
const PACE: Duration = Duration::from_secs(1);

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn offloading_outlives_takeover_from_liqo() -> Result<()> {
    play_on([("rome", 1, 1), ("milan", 2, 1)], live)
}

fn live(clusters: &[Kubernetes; 2], image: &Image) -> Result<()> {
    let [rome, milan] = clusters;
    let guide = Guide::read()?;
    step("Liqo with its network is installed", || {
        each(clusters, |cluster| {
            label_head(cluster)?;
            cluster.load(image)?;
            cluster.install_liqo_network(TIMEOUT)
        })
    })?;
    step("liqoctl peers them", || peer(rome, milan, &["--timeout=150s"]))?;
    let [near, far] = step("a namespace is offloaded", || offload(rome, milan))?;
    step("Liqo's virtual kubelet leads", || leads(rome))?;
    let offloading = Offloading::of(clusters, [&near, &far])?;
    step("pods and Services are reached by Liqo's network", || offloading.is_well())?;
    let before = step("all is granted", || {
        wait_until("far has an IP", SOON, || rome.get(Object::new(IPS, DEMO, "far")))?;
        each(clusters, granted)?;
        each(clusters, |cluster| Kept::of(cluster, &[&OF_PEERING]))
    })?;

    let pods = [vec![near.clone()], vec![far.clone()]];
    let peers = Peers { pods: &pods, views: [rome.view(&milan.spec)?, milan.view(&rome.spec)?] };
    let change = Change { peers: &peers, guide: &guide };
    let mut outages = Vec::new();
    for cluster in clusters {
        outages.push(offloading.outlives(&before, || change.take_over(cluster))?);
    }
    for cluster in clusters {
        outages.push(offloading.outlives(&before, || change.give_back(cluster))?);
    }
    let are_short = outages.iter().all(|outage| *outage < OUTAGE);
    ensure!(are_short, "clusters were cut off for {outages:?}, expected less than {OUTAGE:?}");
    Ok(())
}

/// Pods near and far, and a Service of each in both clusters.
struct Offloading<'a> {
    clusters: &'a [Kubernetes; 2],
    pods: [&'a Pod; 2],
    stored: [Stored<'a>; 2],
}

/// Addresses that Liqo and Kubernetes store in a cluster for a Service whose pod is in the other one.
struct Stored<'a> {
    cluster: &'a Kubernetes,
    service: String,
    /// Address of the pod as this cluster sees it.
    expected: IpAddr,
}

impl<'a> Offloading<'a> {
    fn of(clusters: &'a [Kubernetes; 2], pods: [&'a Pod; 2]) -> Result<Self> {
        let [rome, milan] = clusters;
        let [near, far] = as_seen(clusters, pods)?;
        let stored = [(rome, "far", far), (milan, "near", near)];
        let stored = stored.map(|(cluster, pod, expected)| Stored {
            cluster,
            service: service_of(pod),
            expected,
        });
        Ok(Self { clusters, pods, stored })
    }

    /// Changes the network of a cluster; returns what that returns, once all is well again.
    fn outlives<T>(&self, before: &[Kept], change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.watched(|| {
            let result = change()?;
            let began = Instant::now();
            step("pods and Services are reached", || self.is_well())?;
            note_time(began.elapsed(), "after the change");
            step("no address is unmapped any more", || {
                stays_so("all is mapped", SETTLED, || self.is_mapped())
            })?;
            step("IPs and Networks are the same", || {
                let mut all = self.clusters.iter().zip(before);
                all.try_for_each(|(cluster, before)| before.is_there(cluster))
            })?;
            Ok(result)
        })
    }

    fn is_well(&self) -> Result<()> {
        let began = Instant::now();
        pods_reach(self.clusters, self.pods, REACHED)?;
        let left = REACHED.saturating_sub(began.elapsed());
        wait_until("all is mapped", left, || self.is_mapped())?;
        reaches_home(self.clusters, self.pods[1])
    }

    fn is_mapped(&self) -> Result<()> {
        self.stored.iter().try_for_each(|stored| {
            let (found, expected) = (stored.addresses()?, stored.expected);
            let (id, service) = (&stored.cluster.spec.id, &stored.service);
            ensure!(found == [expected], "{service} in {id}: {found:?}, expected {expected}");
            Ok(())
        })
    }

    /// Prints which addresses were unmapped meanwhile, and the longest time of one cluster.
    fn watched<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let (result, gaps) = std::thread::scope(|scope| {
            let watches = self.stored.each_ref().map(|stored| {
                // It ends with its sender, also if this thread panics.
                let (running, ended) = mpsc::channel::<()>();
                (running, scope.spawn(move || stored.gap(&ended)))
            });
            let (running, watches): (Vec<_>, Vec<_>) = watches.into_iter().unzip();
            let result = f();
            drop(running);
            let join = |watch: std::thread::ScopedJoinHandle<'_, Gap>| {
                watch.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            (result, watches.into_iter().map(join).collect::<Vec<_>>())
        });
        for (stored, gap) in self.stored.iter().zip(gaps) {
            let (id, service) = (&stored.cluster.spec.id, &stored.service);
            let Gap { longest, unmapped, looks } = gap;
            note_time(longest, &format!("longest time for which {service} was unmapped in {id}"));
            note(&format!("unmapped in {id}, of {looks} looks: {unmapped:?}"));
        }
        result
    }
}

/// Time for which addresses of a cluster were unmapped.
#[derive(Default)]
struct Gap {
    longest: Duration,
    unmapped: BTreeSet<IpAddr>,
    looks: usize,
}

impl Stored<'_> {
    fn addresses(&self) -> Result<Vec<IpAddr>> {
        let of = format!("kubernetes.io/service-name={}", self.service);
        Ok(addresses(&list(self.cluster, "endpointslices.discovery.k8s.io", Some(DEMO), &of)?))
    }

    /// Looks until the channel is closed. Both clusters have the same pod CIDR, which neither sees the other's as.
    fn gap(&self, ended: &mpsc::Receiver<()>) -> Gap {
        let (mut gap, mut since) = (Gap::default(), None::<Instant>);
        while ended.recv_timeout(PACE) == Err(RecvTimeoutError::Timeout) {
            // An API server may be busy.
            let Ok(found) = self.addresses() else { continue };
            let now = Instant::now();
            gap.looks += 1;
            let own = self.cluster.spec.pod_cidrs[0];
            let unmapped: Vec<_> = found.into_iter().filter(|one| own.contains(one)).collect();
            if !unmapped.is_empty() || since.is_some() {
                let began = *since.get_or_insert(now);
                gap.longest = gap.longest.max(now.duration_since(began));
            }
            if unmapped.is_empty() {
                since = None;
            }
            gap.unmapped.extend(unmapped);
        }
        gap
    }
}
