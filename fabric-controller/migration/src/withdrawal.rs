//! Takes away what weft has made in a cluster, for good: before its chart is uninstalled.
//!
//! First the gateways, since nodes that are cleared answer what a gateway still sends them with ICMP
//! errors, which quote packets of peers in clear; then [`nodes`], as long as their agents run, then all
//! else that weft has made (`leftovers`), then what it has written into objects of users (`marks`).
//! Each lists what is there until nothing is, so that a second run goes on where the first one
//! ended.

pub(crate) mod cluster;
mod leftovers;
mod marks;
mod nodes;

use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::{ApiError, ApiServer};
use k8s_openapi::api::core::v1::Pod;
use tokio::time::timeout;

use cluster::{Cluster, answered, kind};
use fabric_kube_client::lease::Election;
use gateway_workloads::clear_foreign_clusters;

/// All runs are one holder of the Lease: the next one need not wait for the one before.
const IDENTITY: &str = "withdrawal";
/// Timeout for the Lease, which a controller that was killed holds for a while.
const ELECTION: Duration = Duration::from_secs(45);
/// Timeout for ForeignClusters. Refused writes are tried twice.
const ANSWER: Duration = Duration::from_secs(8);
/// Maximum number of terms with the Lease, which is lost while answers are late.
const TERMS: u32 = 3;
/// Time for helm to remove the controllers. If it does not, one of them makes all anew then.
const LOCKED: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum WithdrawError {
    #[error("cannot acquire the Lease of the fabric-controllers within {} s", ELECTION.as_secs())]
    NotElected,
    #[error("the Lease of the fabric-controllers is lost; one of them may work now")]
    Lost,
    #[error("cannot {verb} {what}")]
    Api { verb: &'static str, what: String, source: ApiError },
    #[error("cannot lock the Lease")]
    Locked(#[source] ApiError),
    #[error("made again after they were removed: {}", .0.join(", "))]
    MadeAgain(Vec<String>),
    #[error("not all is removed within {} s; the last ones: {}", leftovers::REMOVAL.as_secs(), .0.join(", "))]
    Remaining(Vec<String>),
}

/// Prefixes of peers and mapped addresses after a withdrawal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefixes {
    /// Free for others.
    Returned,
    /// Kept in the statuses of Networks, IPs and Configurations for Liqo's own network.
    Kept,
}

/// Nodes that do not answer hold it up for no longer than `at_most`, and pods that do not end for
/// half a minute.
pub async fn withdraw(
    server: ApiServer,
    at_most: Duration,
    prefixes: Prefixes,
) -> Result<(), WithdrawError> {
    let mut election = Election::new(&server, IDENTITY).taking_over();
    for term in 1.. {
        timeout(ELECTION, election.won()).await.map_err(|_| WithdrawError::NotElected)?;
        tokio::select! {
            done = take_away(&server, at_most, prefixes) => {
                done?;
                break;
            }
            () = election.lost() => {}
        }
        if term == TERMS {
            return Err(WithdrawError::Lost);
        }
        tracing::warn!("the Lease of the fabric-controllers is lost; begins anew");
    }
    let locked = answered(async || election.leave_locked(LOCKED).await).await;
    locked.map_err(WithdrawError::Locked)?;
    if let Err(error) = give_up_stuck_pods(&Cluster::new(&server)).await {
        tracing::warn!(%error, "pods of this Job on nodes that have died may hold it up");
    }
    tracing::info!("nothing of weft is left but its programs");
    Ok(())
}

async fn take_away(
    server: &ApiServer,
    at_most: Duration,
    prefixes: Prefixes,
) -> Result<(), WithdrawError> {
    let cluster = Cluster::new(server);
    leftovers::end_gateways(&cluster).await?;
    nodes::clear(&cluster, at_most).await?;
    if prefixes == Prefixes::Kept {
        leftovers::hand_over(&cluster).await?;
    }
    leftovers::remove(&cluster).await?;
    leftovers::remove_keys(&cluster).await?;
    marks::remove(&cluster, prefixes).await?;
    if timeout(ANSWER, clear_foreign_clusters(server)).await.is_err() {
        tracing::warn!("ForeignClusters still have the status that weft wrote");
    }
    leftovers::remove_shared(&cluster, &server.namespace).await?;
    leftovers::remove_webhooks(&cluster).await
}

/// Removes pods of the same Job that were to end and did not: the node of each has failed. The Job,
/// and with it helm, would wait for them.
async fn give_up_stuck_pods(cluster: &Cluster) -> Result<(), WithdrawError> {
    let pods = kind::<Pod>();
    let of_job = cluster.list_metadata(&pods, &format!("{}=withdrawal", labels::PROGRAM)).await?;
    for pod in of_job.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()) {
        cluster.give_up(&pods, pod).await?;
    }
    Ok(())
}
