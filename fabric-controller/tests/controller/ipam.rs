//! Liqo's IPAM service, just good enough: exact prefix if free, else the next of the same length.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fabric_api::Cidr;
use ipam_proto::ipam_server::{Ipam, IpamServer};
use ipam_proto::{
    Address, IpAcquireRequest, IpAcquireResponse, IpReleaseRequest, IpReleaseResponse,
    NetworkAcquireRequest, NetworkAcquireResponse, NetworkAvailableRequest,
    NetworkAvailableResponse, NetworkReleaseRequest, NetworkReleaseResponse,
};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

pub(crate) struct FakeIpam {
    path: PathBuf,
    pub(crate) taken: Taken,
    /// Its own, so that a kill takes every connection with it.
    server: Option<Runtime>,
}

#[derive(Clone, Default)]
pub(crate) struct Taken(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// Each with the number of its holders: Networks that are kept as they are may share one.
    prefixes: BTreeMap<Cidr, usize>,
    addresses: BTreeMap<String, u32>,
    next: u32,
    acquired: usize,
}

impl FakeIpam {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, taken: Taken::default(), server: None }
    }

    pub(crate) fn address(&self) -> Address {
        Address::Unix(self.path.clone())
    }

    pub(crate) fn start(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let guard = runtime.enter();
        let listener = UnixListener::bind(&self.path).unwrap();
        let service = IpamServer::new(self.taken.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        let serve = server.serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(async move { serve.await.unwrap() });
        drop(guard);
        self.server = Some(runtime);
    }

    /// Ends it as a kill does.
    pub(crate) fn kill(&mut self) {
        self.server.take().unwrap().shutdown_background();
        std::fs::remove_file(&self.path).unwrap();
    }
}

impl Drop for FakeIpam {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }
}

impl Taken {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prefixes and number of addresses held.
    pub(crate) fn held(&self) -> (Vec<String>, usize) {
        let inner = self.lock();
        (inner.prefixes.keys().map(ToString::to_string).collect(), inner.addresses.len())
    }

    /// Grants a prefix to another cluster's program, or takes it back.
    pub(crate) fn set_taken(&self, prefix: &str, is_taken: bool) {
        let (mut inner, prefix) = (self.lock(), prefix.parse().unwrap());
        _ = if is_taken {
            inner.prefixes.insert(prefix, 1)
        } else {
            inner.prefixes.remove(&prefix)
        };
    }

    /// Forgets all prefixes but one, as with a state directory that is lost.
    pub(crate) fn forget_all_but(&self, prefix: &str) {
        let prefix = prefix.parse().unwrap();
        self.lock().prefixes.retain(|taken, _| *taken == prefix);
    }

    /// Number of requests for prefixes and addresses.
    pub(crate) fn acquired(&self) -> usize {
        self.lock().acquired
    }
}

fn parsed(cidr: &str) -> Result<Cidr, Status> {
    cidr.parse().map_err(|_| Status::invalid_argument("no prefix"))
}

#[tonic::async_trait]
impl Ipam for Taken {
    async fn ip_acquire(
        &self,
        request: Request<IpAcquireRequest>,
    ) -> Result<Response<IpAcquireResponse>, Status> {
        let cidr = parsed(&request.into_inner().cidr)?;
        let mut inner = self.lock();
        if !inner.prefixes.contains_key(&cidr) {
            return Err(Status::not_found("no such prefix"));
        }
        inner.acquired += 1;
        inner.next += 1;
        let std::net::IpAddr::V4(first) = cidr.address() else {
            return Err(Status::unimplemented("IPv4 only"));
        };
        let ip = std::net::Ipv4Addr::from(u32::from(first) + inner.next).to_string();
        let next = inner.next;
        inner.addresses.insert(ip.clone(), next);
        Ok(Response::new(IpAcquireResponse { ip, result: None }))
    }

    async fn ip_release(
        &self,
        request: Request<IpReleaseRequest>,
    ) -> Result<Response<IpReleaseResponse>, Status> {
        self.lock().addresses.remove(&request.into_inner().ip);
        Ok(Response::new(IpReleaseResponse { result: None }))
    }

    async fn network_acquire(
        &self,
        request: Request<NetworkAcquireRequest>,
    ) -> Result<Response<NetworkAcquireResponse>, Status> {
        let request = request.into_inner();
        let wanted = parsed(&request.cidr)?;
        let mut inner = self.lock();
        inner.acquired += 1;
        let free = |cidr: &Cidr| !inner.prefixes.keys().any(|taken| taken.overlaps(cidr));
        let others = (64..=255).map(|n| format!("10.{n}.0.0").parse().unwrap());
        let mut others = others.filter_map(|first| Cidr::around(first, wanted.len()));
        if request.immutable && request.exclusive && !free(&wanted) {
            return Err(Status::already_exists(format!("{wanted} is taken")));
        }
        let granted =
            if request.immutable || free(&wanted) { Some(wanted) } else { others.find(free) };
        let granted = granted.ok_or_else(|| Status::resource_exhausted("no room"))?;
        *inner.prefixes.entry(granted).or_default() += 1;
        let cidr = granted.to_string();
        Ok(Response::new(NetworkAcquireResponse { cidr, result: None }))
    }

    async fn network_release(
        &self,
        request: Request<NetworkReleaseRequest>,
    ) -> Result<Response<NetworkReleaseResponse>, Status> {
        let cidr = parsed(&request.into_inner().cidr)?;
        if let Entry::Occupied(mut holders) = self.lock().prefixes.entry(cidr) {
            *holders.get_mut() -= 1;
            if *holders.get() == 0 {
                holders.remove();
            }
        }
        Ok(Response::new(NetworkReleaseResponse { result: None }))
    }

    async fn network_is_available(
        &self,
        _: Request<NetworkAvailableRequest>,
    ) -> Result<Response<NetworkAvailableResponse>, Status> {
        Ok(Response::new(NetworkAvailableResponse { available: true, result: None }))
    }
}
