//! Acquires prefixes and addresses from ipam, and releases them.

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use ipam_proto::ipam_client::IpamClient;
use ipam_proto::{
    Address, IpAcquireRequest, IpReleaseRequest, NetworkAcquireRequest, NetworkReleaseRequest,
};
use tokio::time::timeout;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use fabric_core::{Allocation, IpamRequest};
use fabric_index::Grant;

const TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a request and for what comes before it, such as looking ipam's name up.
const LONGEST: Duration = Duration::from_secs(6);
/// Requests sent at a time: ipam notes together what it grants or releases at a time.
const MAX_REQUESTS: usize = 64;

/// One go at everything that is to be released and acquired.
#[derive(Debug, Default)]
pub struct Round {
    pub granted: Vec<(IpamRequest, Grant)>,
    pub denied: Vec<(IpamRequest, String)>,
    /// Grants not released yet. They must be before any further request: a late release could
    /// otherwise release the next grant.
    pub unreleased: Vec<Grant>,
    /// Reason why no more requests could be sent to ipam.
    pub unreachable: Option<String>,
}

/// A connection that is made when it is needed, and again when it was lost.
#[derive(Clone, Debug)]
pub struct Ipam {
    client: IpamClient<InterceptedService<Channel, TokenFile>>,
}

/// File with a token for ipam, if it wants one. It is replaced before the token in it expires.
#[derive(Clone, Debug)]
struct TokenFile(Option<PathBuf>);

impl Interceptor for TokenFile {
    fn call(&mut self, mut call: Request<()>) -> Result<Request<()>, Status> {
        let Some(file) = &self.0 else { return Ok(call) };
        let failed = |error: &dyn Display| {
            Status::unavailable(format!("--ipam-token: found {}: {error}", file.display()))
        };
        let token = fs::read_to_string(file).map_err(|error| failed(&error))?;
        let value = format!("Bearer {}", token.trim()).parse();
        call.metadata_mut().insert(
            "authorization",
            value.map_err(|error| {
                let error: tonic::metadata::errors::InvalidMetadataValue = error;
                failed(&error)
            })?,
        );
        Ok(call)
    }
}

impl Ipam {
    /// Must be called within a tokio runtime. Nothing is sent yet.
    pub fn new(address: &Address, token: Option<PathBuf>) -> Result<Self, tonic::transport::Error> {
        // A connection to a replica whose node is gone ends before the request does, and the next one leads
        // to another replica.
        let endpoint = address.endpoint()?.timeout(TIMEOUT).connect_timeout(TIMEOUT);
        let endpoint = endpoint.http2_keep_alive_interval(TIMEOUT / 4);
        let channel = endpoint.keep_alive_timeout(TIMEOUT / 2).connect_lazy();
        Ok(Self { client: IpamClient::with_interceptor(channel, TokenFile(token)) })
    }

    /// Releases first, then acquires, prefixes that cannot be remapped one after the other and before all
    /// others, then those that gateways have. Stops where ipam cannot be reached.
    pub async fn round(self, releases: Vec<Grant>, ipam_requests: Vec<IpamRequest>) -> Round {
        let mut round = Round::default();
        self.release_all(releases, &mut round).await;
        if round.unreachable.is_some() {
            return round;
        }
        let (fixed, others): (Vec<_>, Vec<_>) = ipam_requests.into_iter().partition(is_fixed);
        let (published, others): (Vec<_>, Vec<_>) = others.into_iter().partition(is_published);
        for (requests, at_a_time) in [(fixed, 1), (published, MAX_REQUESTS), (others, MAX_REQUESTS)]
        {
            if round.unreachable.is_none() {
                self.acquire_all(requests, at_a_time, &mut round).await;
            }
        }
        round
    }

    async fn release_all(&self, releases: Vec<Grant>, round: &mut Round) {
        let answers = releases.into_iter().map(|grant| {
            let mut ipam = self.clone();
            async move { (bounded(ipam.release(grant)).await, grant) }
        });
        let mut answers = stream::iter(answers).buffer_unordered(MAX_REQUESTS);
        while let Some((answer, grant)) = answers.next().await {
            match answer {
                Err(status) if is_unreachable(&status) => {
                    round.unreleased.push(grant);
                    round.unreachable = Some(reason(&status));
                }
                Err(status) => tracing::warn!(?grant, reason = reason(&status), "not released"),
                Ok(()) => tracing::debug!(?grant, "released"),
            }
        }
    }

    async fn acquire_all(&self, requests: Vec<IpamRequest>, at_a_time: usize, round: &mut Round) {
        let answers = requests.into_iter().map(|request| {
            let mut ipam = self.clone();
            async move { (bounded(ipam.acquire(&request.allocation)).await, request) }
        });
        let mut answers = stream::iter(answers).buffered(at_a_time);
        while let Some((answer, request)) = answers.next().await {
            match answer {
                Ok(grant) => round.granted.push((request, grant)),
                Err(status) if is_unreachable(&status) => {
                    round.unreachable = Some(reason(&status));
                    return;
                }
                Err(status) => round.denied.push((request, reason(&status))),
            }
        }
    }

    async fn acquire(&mut self, allocation: &Allocation) -> Result<Grant, Status> {
        match *allocation {
            Allocation::Network { cidr, immutable, exclusive, pre_allocated, .. } => {
                let cidr = cidr.to_string();
                let request = NetworkAcquireRequest { cidr, immutable, pre_allocated, exclusive };
                let granted = self.client.network_acquire(request).await?.into_inner().cidr;
                Ok(Grant::Network(understood(&granted)?))
            }
            Allocation::Address { cidr, from_end } => {
                let request = IpAcquireRequest { cidr: cidr.to_string(), from_end };
                let granted = self.client.ip_acquire(request).await?.into_inner().ip;
                Ok(Grant::Address { ip: understood(&granted)?, cidr })
            }
        }
    }

    async fn release(&mut self, grant: Grant) -> Result<(), Status> {
        match grant {
            Grant::Network(cidr) => {
                let request = NetworkReleaseRequest { cidr: cidr.to_string() };
                self.client.network_release(request).await.map(drop)
            }
            Grant::Address { ip, cidr } => {
                let request = IpReleaseRequest { ip: ip.to_string(), cidr: cidr.to_string() };
                self.client.ip_release(request).await.map(drop)
            }
        }
    }
}

async fn bounded<T>(answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = "no answer, and no connection; does the cluster's DNS know its name?";
    timeout(LONGEST, answer).await.unwrap_or_else(|_| Err(Status::deadline_exceeded(late)))
}

fn is_fixed(request: &IpamRequest) -> bool {
    matches!(request.allocation, Allocation::Network { immutable: true, .. })
}

fn is_published(request: &IpamRequest) -> bool {
    matches!(request.allocation, Allocation::Network { is_published: true, .. })
}

fn understood<T: std::str::FromStr>(granted: &str) -> Result<T, Status> {
    let unfit =
        || Status::internal(format!("ipam granted {granted:?}; expected a prefix or an address"));
    granted.parse().map_err(|_| unfit())
}

fn is_unreachable(status: &Status) -> bool {
    // A broken connection is reported as Unknown.
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown
    )
}

fn reason(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
