//! Liqo's gRPC service on top of the [`Ledger`].

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fabric_api::Cidr;
use fabric_store::{Store, StoreError};
use ipam_proto::ipam_server::Ipam;
use ipam_proto::{
    IpAcquireRequest, IpAcquireResponse, IpReleaseRequest, IpReleaseResponse,
    NetworkAcquireRequest, NetworkAcquireResponse, NetworkAvailableRequest,
    NetworkAvailableResponse, NetworkReleaseRequest, NetworkReleaseResponse,
};
use tonic::{Request, Response, Status};

use crate::ledger::{Ledger, OpenGrant};
use crate::pools::{self, AcquireError, AddressError, Wish};

/// The ledger, shared by the calls and the keeper; absent until it has been rebuilt.
#[derive(Clone)]
pub(crate) struct Shared {
    ledger: Arc<Mutex<Option<Ledger>>>,
    store: Store,
}

/// Name of the note of what was granted a moment ago.
const OPEN_GRANTS: &str = "ipam-open-grants";

impl Shared {
    pub(crate) fn new(store: Store) -> Self {
        Self { ledger: Arc::default(), store }
    }

    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Option<Ledger>) -> T) -> T {
        // No operation of the ledger leaves it half done, so one that panicked changes nothing.
        act(&mut self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes what was granted a moment ago: an ipam that dies now must not grant it again.
    pub(crate) fn note(&self, ledger: &Ledger) -> Result<(), StoreError> {
        self.store.put_note(OPEN_GRANTS, &ledger.open()).map(drop)
    }

    pub(crate) fn noted(&self) -> Vec<OpenGrant> {
        self.store.note(OPEN_GRANTS).unwrap_or_default()
    }

    /// Grants, and notes it before anybody is told. What cannot be noted is not granted.
    fn grant<T: Copy>(
        &self,
        act: impl FnOnce(&mut Ledger, Instant) -> Result<T, Status>,
        undo: impl FnOnce(&mut Ledger, T, Instant) -> bool,
    ) -> Result<T, Status> {
        self.ledger(|ledger, now| {
            let granted = act(ledger, now)?;
            self.note(ledger).map_err(|error| {
                undo(ledger, granted, now);
                Status::unavailable(format!("the grant cannot be noted, try again: {error}"))
            })?;
            Ok(granted)
        })?
    }

    fn ledger<T>(&self, act: impl FnOnce(&mut Ledger, Instant) -> T) -> Result<T, Status> {
        self.with(|ledger| ledger.as_mut().map(|ledger| act(ledger, Instant::now())))
            .ok_or_else(|| Status::unavailable("ipam has not read yet what is taken; try again"))
    }
}

/// Answers the calls.
pub(crate) struct Service(pub(crate) Shared);

#[tonic::async_trait]
impl Ipam for Service {
    async fn ip_acquire(
        &self,
        request: Request<IpAcquireRequest>,
    ) -> Result<Response<IpAcquireResponse>, Status> {
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        let address = self.0.grant(
            |ledger, now| ledger.acquire_address(cidr, now).map_err(address_status),
            |ledger, address, now| ledger.release_address(cidr, address, now),
        )?;
        tracing::info!(%cidr, %address, "address granted");
        Ok(Response::new(IpAcquireResponse { ip: address.to_string(), result: None }))
    }

    async fn ip_release(
        &self,
        request: Request<IpReleaseRequest>,
    ) -> Result<Response<IpReleaseResponse>, Status> {
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        let address: IpAddr = parse(&request.get_ref().ip)?;
        if self.0.ledger(|ledger, now| ledger.release_address(cidr, address, now))? {
            tracing::info!(%cidr, %address, "address given back");
        }
        Ok(Response::new(IpReleaseResponse::default()))
    }

    async fn network_acquire(
        &self,
        request: Request<NetworkAcquireRequest>,
    ) -> Result<Response<NetworkAcquireResponse>, Status> {
        let wanted = request.into_inner();
        let request = pools::Request {
            cidr: parse(&wanted.cidr)?,
            wish: match (wanted.immutable, wanted.exclusive) {
                (true, true) => Wish::Exclusive,
                (true, false) => Wish::Shared,
                (false, _) => Wish::Mutable,
            },
            pre_allocated: wanted.pre_allocated,
        };
        let granted = self.0.grant(
            |ledger, now| ledger.acquire(request, now).map_err(acquire_status),
            Ledger::release,
        )?;
        tracing::info!(asked = %request.cidr, %granted, wish = ?request.wish, "prefix granted");
        Ok(Response::new(NetworkAcquireResponse { cidr: granted.to_string(), result: None }))
    }

    async fn network_release(
        &self,
        request: Request<NetworkReleaseRequest>,
    ) -> Result<Response<NetworkReleaseResponse>, Status> {
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        if self.0.ledger(|ledger, now| ledger.release(cidr, now))? {
            tracing::info!(%cidr, "prefix given back");
        }
        Ok(Response::new(NetworkReleaseResponse::default()))
    }

    async fn network_is_available(
        &self,
        request: Request<NetworkAvailableRequest>,
    ) -> Result<Response<NetworkAvailableResponse>, Status> {
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        let available = self.0.ledger(|ledger, _| ledger.is_available(cidr))?;
        Ok(Response::new(NetworkAvailableResponse { available, result: None }))
    }
}

fn parse<T: FromStr<Err: Display>>(text: &str) -> Result<T, Status> {
    text.parse().map_err(|error| Status::invalid_argument(format!("{text:?}: {error}")))
}

fn acquire_status(error: AcquireError) -> Status {
    let message = error.to_string();
    match error {
        AcquireError::Taken { .. } => Status::already_exists(message),
        AcquireError::OutsidePools { .. } => Status::failed_precondition(message),
        AcquireError::NoneFree { .. } => Status::resource_exhausted(message),
        AcquireError::TooManyPreAllocated { .. } => Status::invalid_argument(message),
    }
}

fn address_status(error: AddressError) -> Status {
    let message = error.to_string();
    match error {
        AddressError::PrefixNotTaken(_) => Status::failed_precondition(message),
        AddressError::NoneFree(_) => Status::resource_exhausted(message),
    }
}
