//! What the gateway is told: its GatewayConfig and its private key, followed in the store.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use fabric_api::PrivateKey;
use fabric_api::fabric::GatewayConfig;
use fabric_store::{Event, Kind, Object, ObjectRef, Problem, Store};
use k8s_openapi::api::core::v1::Secret;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::desired::Desired;
use crate::secret::private_key;

/// The latest of everything.
#[derive(Clone, Debug, Default)]
pub struct Input {
    /// All that was there at the start has been read.
    pub synced: bool,
    /// The newest config, good or bad; absent before the first and after its deletion.
    pub config: Option<Arc<GatewayConfig>>,
    /// The last good one, which stays when a bad one or a deletion follows.
    pub desired: Option<Arc<Desired>>,
    pub key: Option<PrivateKey>,
    /// Where the peer was when an earlier gateway last heard it.
    pub remembered: Option<SocketAddr>,
    /// What is wrong with the newest config, its file, or the key.
    pub config_problems: Vec<String>,
    pub unreadable: Option<String>,
    pub key_problem: Option<String>,
}

/// Follows the store until `stop`.
pub async fn run(
    store: Store,
    name: ObjectRef,
    inputs: watch::Sender<Input>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut watch = store.follow(&name, &[Kind::Secret]).context("cannot watch the store")?;
    loop {
        let event = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            event = watch.next() => event,
        };
        inputs.send_if_modified(|input| match event {
            Event::Applied(object) => match *object {
                Object::GatewayConfig(config) if is(&name, &config.metadata) => {
                    let news = input.take_config(config);
                    input.remember(&store, &name);
                    news && input.read_key(&store, &name)
                }
                Object::Secret(secret) => input.take_secret(&name, &secret),
                // Not asked for.
                Object::Namespace(_)
                | Object::ConfigMap(_)
                | Object::Node(_)
                | Object::Network(_)
                | Object::Ip(_)
                | Object::Configuration(_)
                | Object::Connection(_)
                | Object::GatewayServer(_)
                | Object::GatewayClient(_)
                | Object::PublicKey(_)
                | Object::GatewayConfig(_)
                | Object::NodeConfig(_) => false,
            },
            Event::Deleted(object) if object == name => {
                forget(&store, &name);
                input.lose_config()
            }
            Event::Deleted(object) => input.lose_secret(&name, &object),
            Event::Problems(problems) => input.take_problems(&name, &problems),
            Event::Synced => {
                input.synced = true;
                if input.recall(&store, &name) {
                    input.read_key(&store, &name);
                }
                true
            }
        });
    }
}

/// Under which the last good config is kept, for a gateway that starts while the newest is bad.
fn note_name(name: &ObjectRef) -> String {
    format!("gateway.{}.{}", name.namespace.as_deref().unwrap_or_default(), name.name)
}

fn forget(store: &Store, name: &ObjectRef) {
    if let Err(error) = store.delete_note(&note_name(name)) {
        tracing::warn!(%error, "cannot forget the last good config");
    }
}

fn is(
    name: &ObjectRef,
    metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
) -> bool {
    metadata.name.as_deref() == Some(&name.name) && metadata.namespace == name.namespace
}

impl Input {
    /// Problems to show in the status.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        let key = self.key_problem.iter().map(|problem| match &self.key {
            Some(_) => format!("{problem}; running on the key it had, which a restart would lose"),
            None => format!("{problem}; expected the private key, without which nothing runs"),
        });
        self.config_problems.iter().cloned().chain(self.unreadable.clone()).chain(key)
    }

    /// True if there is something new: a status of our own making is not, and for one uid a lower
    /// generation than before is old news that arrives late.
    fn take_config(&mut self, config: GatewayConfig) -> bool {
        let version = |c: &GatewayConfig| (c.metadata.uid.clone(), c.metadata.generation);
        if let Some(known) = &self.config {
            let ((uid, generation), (known_uid, known_generation)) =
                (version(&config), version(known));
            if uid == known_uid && generation < known_generation {
                tracing::debug!(?generation, ?known_generation, "an old config, ignored");
                return false;
            }
            if uid == known_uid && generation == known_generation && config.spec == known.spec {
                return false;
            }
        } else if self.remembered.is_none() {
            let status = config.status.as_ref();
            self.remembered = status.and_then(|s| s.peer_endpoint.as_ref()?.parse().ok());
        }
        match Desired::parse(&config) {
            Ok(desired) => {
                self.desired = Some(Arc::new(desired));
                self.config_problems.clear();
            }
            Err(error) => {
                tracing::warn!(%error, "bad config, staying on the last good one");
                self.config_problems = error.lines();
            }
        }
        self.config = Some(Arc::new(config));
        true
    }

    /// Keeps a good config. There is no key material in it.
    fn remember(&self, store: &Store, name: &ObjectRef) {
        let good = self.config.as_ref().filter(|_| self.config_problems.is_empty());
        let Some(good) = good else { return };
        let note = GatewayConfig { status: None, ..GatewayConfig::clone(good) };
        if let Err(error) = store.put_note(&note_name(name), &note) {
            tracing::warn!(%error, "cannot keep the last good config");
        }
    }

    /// At the start, if the config is there and bad: the last good one. True if there is one.
    fn recall(&mut self, store: &Store, name: &ObjectRef) -> bool {
        let bad = self.config.is_some() || self.unreadable.is_some();
        if self.desired.is_some() || !bad {
            return false;
        }
        let Some(good) = store.note::<GatewayConfig>(&note_name(name)) else { return false };
        let Ok(desired) = Desired::parse(&good) else { return false };
        tracing::warn!(generation = desired.generation, "running on the last good config");
        self.desired = Some(Arc::new(desired));
        self.config.get_or_insert_with(|| Arc::new(good));
        true
    }

    /// What is told of the config's file.
    fn take_problems(&mut self, name: &ObjectRef, problems: &[Problem]) -> bool {
        let of_config = problems.iter().find(|problem| problem.object.as_ref() == Some(name));
        let now =
            of_config.map(|p| format!("{}: {}; the last good one stands", p.source, p.message));
        let before = std::mem::replace(&mut self.unreadable, now);
        before != self.unreadable
    }

    /// Always true: what led here was news.
    fn read_key(&mut self, store: &Store, name: &ObjectRef) -> bool {
        let Some(desired) = &self.desired else { return true };
        let secret_name = desired.secret_name.clone();
        let namespace = name.namespace.as_deref().unwrap_or_default();
        match store.get(&ObjectRef::new(Kind::Secret, namespace, &secret_name)) {
            Ok(object) => {
                let secret = object.and_then(|object| Secret::try_from(object).ok());
                self.set_key(&secret_name, secret.as_ref());
            }
            Err(error) => {
                let error = anyhow::Error::new(error);
                self.key_problem = Some(format!("cannot read Secret {secret_name}: {error:#}"));
            }
        }
        true
    }

    fn take_secret(&mut self, name: &ObjectRef, secret: &Secret) -> bool {
        let Some(wanted) = self.secret_name() else { return false };
        let meta = &secret.metadata;
        if meta.name.as_deref() != Some(&wanted) || meta.namespace != name.namespace {
            return false;
        }
        self.set_key(&wanted, Some(secret))
    }

    fn lose_secret(&mut self, name: &ObjectRef, lost: &ObjectRef) -> bool {
        let Some(wanted) = self.secret_name() else { return false };
        let ours = lost.kind == Kind::Secret && lost.name == wanted;
        ours && lost.namespace == name.namespace && self.set_key(&wanted, None)
    }

    /// The last good key stays, like the last good config.
    fn set_key(&mut self, name: &str, secret: Option<&Secret>) -> bool {
        let before = (self.key.clone(), self.key_problem.clone());
        match private_key(name, secret) {
            Ok(key) => {
                self.key = Some(key);
                self.key_problem = None;
            }
            Err(error) => self.key_problem = Some(error.to_string()),
        }
        before != (self.key.clone(), self.key_problem.clone())
    }

    fn lose_config(&mut self) -> bool {
        tracing::info!("the config is gone, staying on the last one until told to stop");
        self.config.take().is_some()
    }

    fn secret_name(&self) -> Option<String> {
        self.desired.as_ref().map(|desired| desired.secret_name.clone())
    }
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::GatewayConfigStatus;
    use k8s_openapi::ByteString;

    use super::*;
    use crate::desired::tests::config;

    #[test]
    fn a_bad_config_keeps_the_last_good_one_and_says_why() {
        let mut input = Input::default();
        assert!(input.take_config(config()));
        let mut bad = config();
        bad.metadata.generation = Some(2);
        bad.spec.mtu = 1;
        assert!(input.take_config(bad));
        assert_eq!(input.desired.as_ref().unwrap().generation, 1);
        assert_eq!(
            input.problems().collect::<Vec<_>>(),
            ["spec.mtu: 1 bytes; expected 576 to 65535"]
        );
        let mut good = config();
        good.metadata.generation = Some(3);
        assert!(input.take_config(good));
        assert_eq!(input.problems().count(), 0);
    }

    #[test]
    fn a_gateway_that_starts_among_bad_config_runs_on_the_last_good_one() {
        let dir = tempfile::tempdir().unwrap();
        let args = fabric_store::StoreArgs {
            manifests: None,
            run_dir: dir.path().join("run"),
            state_dir: Some(dir.path().join("state")),
        };
        let store = Store::open(&args).unwrap();
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        let mut first = Input::default();
        first.take_config(config());
        first.remember(&store, &name);
        let mut bad = config();
        bad.metadata.generation = Some(2);
        bad.spec.mtu = 1;
        first.take_config(bad.clone());
        first.remember(&store, &name);

        let mut second = Input::default();
        assert!(!second.recall(&store, &name), "without a config there is no peering");
        second.take_config(bad);
        assert!(second.recall(&store, &name));
        assert_eq!(second.desired.as_ref().unwrap().generation, 1);
        assert_eq!(second.problems().next().unwrap(), "spec.mtu: 1 bytes; expected 576 to 65535");

        let mut third = Input::default();
        let problem = Problem {
            source: "liqo-tenant-milan.client.yaml".to_owned(),
            object: Some(name.clone()),
            field: None,
            message: "not as weft wrote it".to_owned(),
        };
        assert!(third.take_problems(&name, &[problem]));
        assert!(third.recall(&store, &name));
        assert!(third.config.is_some(), "or there would be nowhere to report to");
        assert!(third.problems().next().unwrap().ends_with("the last good one stands"));
        assert!(third.take_problems(&name, &[]));
        assert_eq!(third.problems().count(), 0);

        forget(&store, &name);
        assert_eq!(store.note::<GatewayConfig>(&note_name(&name)), None);
    }

    #[test]
    fn a_lower_generation_of_the_same_uid_is_old_news() {
        let mut input = Input::default();
        let version = |uid: &str, generation| {
            let mut config = config();
            config.metadata.uid = Some(uid.to_owned());
            config.metadata.generation = Some(generation);
            config
        };
        assert!(input.take_config(version("u1", 5)));
        assert!(!input.take_config(version("u1", 4)));
        assert!(!input.take_config(version("u1", 5)), "the same again");
        assert!(input.take_config(version("u2", 1)), "made anew");
    }

    #[test]
    fn the_last_endpoint_is_remembered_from_the_first_status_only() {
        let mut input = Input::default();
        let mut first = config();
        let status = |endpoint: &str| {
            Some(GatewayConfigStatus {
                peer_endpoint: Some(endpoint.to_owned()),
                ..Default::default()
            })
        };
        first.status = status("192.0.2.7:1000");
        input.take_config(first);
        let mut second = config();
        second.metadata.generation = Some(2);
        second.status = status("192.0.2.8:1000");
        input.take_config(second);
        assert_eq!(input.remembered, Some("192.0.2.7:1000".parse().unwrap()));
    }

    #[test]
    fn a_new_key_is_taken_over_and_a_lost_one_stays() {
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        let mut input = Input::default();
        input.take_config(config());
        let secret = |name: &str, byte: u8| {
            let mut secret = Secret::default();
            secret.metadata.name = Some(name.to_owned());
            secret.metadata.namespace = Some("liqo-tenant-milan".to_owned());
            secret.data = Some([("privateKey".to_owned(), ByteString(vec![byte; 32]))].into());
            secret
        };
        assert!(!input.take_secret(&name, &secret("other", 1)));
        assert!(input.take_secret(&name, &secret("gw-keys", 1)));
        assert!(!input.take_secret(&name, &secret("gw-keys", 1)), "the same again");
        assert!(input.take_secret(&name, &secret("gw-keys", 2)));
        assert!(
            input.lose_secret(&name, &ObjectRef::new(Kind::Secret, "liqo-tenant-milan", "gw-keys"))
        );
        assert_eq!(input.key.as_ref().unwrap().expose(), &[2; 32]);
        assert_eq!(input.key_problem.as_deref(), Some("Secret gw-keys does not exist"));
    }
}
