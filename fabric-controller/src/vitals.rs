//! State of the controller that probes, metrics and other replicas see.

use fabric_runtime::{Heartbeat, Monitoring, Readiness};

use crate::metrics::Metrics;
use fabric_kube_client::findings::Findings;

/// Part of the [`Readiness`] that is there once everything has been compiled.
pub const COMPILED: &str = "controller";

/// Part of it that is there once the webhook listens.
pub const WEBHOOK: &str = "webhook";

/// Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Vitals {
    /// Heartbeat of the main loop.
    pub heartbeat: Heartbeat,
    /// Heartbeat of the loop that makes gateways run, in Kubernetes only.
    pub gateways: Option<Heartbeat>,
    pub readiness: Readiness,
    pub metrics: Metrics,
    pub findings: Findings,
}

impl Vitals {
    /// Adds the vitals that exist in Kubernetes only.
    pub fn of_kubernetes(self) -> Self {
        self.readiness.missing(WEBHOOK, "not listening yet");
        self.readiness.missing(COMPILED, "the Lease is not seen yet");
        let gateways = Some(Heartbeat::of("gateways"));
        Self { metrics: self.metrics.of_kubernetes(), gateways, ..self }
    }

    /// Ready, though another replica works.
    pub fn standing_by(&self) {
        self.readiness.fulfilled(COMPILED);
    }

    pub fn monitoring(&self) -> Monitoring {
        Monitoring {
            registry: self.metrics.registry(),
            heartbeats: [&self.heartbeat].into_iter().chain(&self.gateways).cloned().collect(),
            readiness: self.readiness.clone(),
        }
    }
}
