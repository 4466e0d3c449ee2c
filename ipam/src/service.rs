//! Liqo's gRPC service on top of the [`Ledger`].

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use fabric_api::Cidr;
use ipam_proto::ipam_server::Ipam;
use ipam_proto::{
    IpAcquireRequest, IpAcquireResponse, IpReleaseRequest, IpReleaseResponse,
    NetworkAcquireRequest, NetworkAcquireResponse, NetworkAvailableRequest,
    NetworkAvailableResponse, NetworkReleaseRequest, NetworkReleaseResponse,
};
use tonic::{Request, Response, Status};

use crate::clients::Clients;
use crate::ledger::Ledger;
use crate::metrics::Grantable;
use crate::pools::{self, AcquireError, AddressError, RequestMode, Search};
use crate::shared::Shared;

/// Answers the calls.
pub(crate) struct Service {
    pub(crate) shared: Shared,
    pub(crate) clients: Clients,
}

impl Service {
    async fn acquire_address(&self, request: &IpAcquireRequest) -> Result<IpAddr, Status> {
        let cidr: Cidr = parse(&request.cidr)?;
        let search = if request.from_end { Search::FromEnd } else { Search::FromStart };
        let granted = self.shared.grant(
            |ledger, now| {
                let address = ledger.acquire_address(cidr, search, now);
                let address = address.map_err(address_status)?;
                Ok((cidr, address))
            },
            |ledger, (cidr, address), now| ledger.release_address(cidr, address, now),
        );
        let (_, address) = granted.await?;
        tracing::info!(%cidr, %address, "address granted");
        Ok(address)
    }

    async fn acquire_prefix(&self, wanted: &NetworkAcquireRequest) -> Result<Cidr, Status> {
        let request = pools::Request {
            cidr: parse(&wanted.cidr)?,
            mode: match (wanted.immutable, wanted.exclusive) {
                (true, true) => RequestMode::Exclusive,
                (true, false) => RequestMode::Shared,
                (false, _) => RequestMode::Mutable,
            },
            pre_allocated: wanted.pre_allocated,
        };
        let granted = self.shared.grant(
            |ledger, now| ledger.acquire(request, now).map_err(acquire_status),
            Ledger::release,
        );
        let granted = granted.await?;
        tracing::info!(asked = %request.cidr, %granted, mode = ?request.mode, "prefix granted");
        Ok(granted)
    }
}

#[tonic::async_trait]
impl Ipam for Service {
    async fn ip_acquire(
        &self,
        request: Request<IpAcquireRequest>,
    ) -> Result<Response<IpAcquireResponse>, Status> {
        self.shared.metrics.count_request("IPAcquire");
        self.clients.admit(&request).await?;
        let granted = self.acquire_address(request.get_ref()).await;
        self.shared.metrics.count_answer(Grantable::Address, &granted);
        Ok(Response::new(IpAcquireResponse { ip: granted?.to_string(), result: None }))
    }

    async fn ip_release(
        &self,
        request: Request<IpReleaseRequest>,
    ) -> Result<Response<IpReleaseResponse>, Status> {
        self.shared.metrics.count_request("IPRelease");
        self.clients.admit(&request).await?;
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        let address: IpAddr = parse(&request.get_ref().ip)?;
        let release = |ledger: &mut Ledger, now| ledger.release_address(cidr, address, now);
        if self.shared.release(release).await? {
            tracing::info!(%cidr, %address, "address given back");
        }
        Ok(Response::new(IpReleaseResponse::default()))
    }

    async fn network_acquire(
        &self,
        request: Request<NetworkAcquireRequest>,
    ) -> Result<Response<NetworkAcquireResponse>, Status> {
        self.shared.metrics.count_request("NetworkAcquire");
        self.clients.admit(&request).await?;
        let granted = self.acquire_prefix(request.get_ref()).await;
        self.shared.metrics.count_answer(Grantable::Prefix, &granted);
        Ok(Response::new(NetworkAcquireResponse { cidr: granted?.to_string(), result: None }))
    }

    async fn network_release(
        &self,
        request: Request<NetworkReleaseRequest>,
    ) -> Result<Response<NetworkReleaseResponse>, Status> {
        self.shared.metrics.count_request("NetworkRelease");
        self.clients.admit(&request).await?;
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        if self.shared.release(|ledger, now| ledger.release(cidr, now)).await? {
            tracing::info!(%cidr, "prefix given back");
        }
        Ok(Response::new(NetworkReleaseResponse::default()))
    }

    async fn network_is_available(
        &self,
        request: Request<NetworkAvailableRequest>,
    ) -> Result<Response<NetworkAvailableResponse>, Status> {
        self.shared.metrics.count_request("NetworkIsAvailable");
        self.clients.admit(&request).await?;
        let cidr: Cidr = parse(&request.get_ref().cidr)?;
        let available = self.shared.is_available(cidr).await?;
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
