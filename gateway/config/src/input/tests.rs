use k8s_openapi::ByteString;

use super::*;
use crate::restart_cache::tests::in_memory;
use crate::test_config::config;

#[test]
fn bad_config_keeps_last_good_and_is_reported() {
    let mut input = Input::default();
    assert!(input.take_config(config()));
    let mut bad = config();
    bad.metadata.generation = Some(2);
    bad.spec.mtu = 1;
    assert!(input.take_config(bad));
    assert_eq!(input.desired.as_ref().unwrap().generation, 1);
    assert_eq!(input.problems().collect::<Vec<_>>(), ["spec.mtu: 1 bytes; expected 576 to 65535"]);
    let mut good = config();
    good.metadata.generation = Some(3);
    assert!(input.take_config(good));
    assert_eq!(input.problems().count(), 0);
}

#[test]
fn epoch_that_no_gateway_writes_is_ignored() {
    let named_with = |epoch| {
        let address = [10, 200, 1, 6].into();
        let mut config = config();
        config.status.get_or_insert_default().active = Some(ActiveReplica { address, epoch });
        named(&config).map(|active| active.epoch)
    };
    assert_eq!(named_with(7), Some(7));
    assert_eq!(named_with(i64::MAX.unsigned_abs()), None);
}

#[tokio::test]
async fn start_with_bad_config_uses_last_good_one() {
    let dir = tempfile::tempdir().unwrap();
    let (run, state) = (dir.path().join("run"), dir.path().join("state"));
    let args = fabric_store::StoreArgs::directories(None, run, Some(state));
    let store = Store::open(&args).unwrap();
    let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
    let mut first = Input::default();
    first.take_config(config());
    first.remember(&store, &name).await;
    let mut bad = config();
    bad.metadata.generation = Some(2);
    bad.spec.mtu = 1;
    first.take_config(bad.clone());
    first.remember(&store, &name).await;

    let mut second = Input::default();
    assert!(!second.recall(&store, &name, false).await, "without a config there is no peering");
    second.take_config(bad);
    assert!(second.recall(&store, &name, false).await);
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
    assert!(third.recall(&store, &name, false).await);
    assert!(third.config.is_some(), "or there would be nowhere to report to");
    assert!(third.problems().next().unwrap().ends_with("the last good one stands"));
    assert!(third.take_problems(&name, &[]));
    assert_eq!(third.problems().count(), 0);

    forget(&store, &name).await;
    let note = note_name(&name);
    assert_eq!(store.note::<GatewayConfig>(Note::Copy(&note)).await.unwrap(), None);
}

fn sources(store: Store, keep: RestartCache) -> (Sources, ObjectRef) {
    let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
    (Sources { store, keep: Some(keep) }, name)
}

#[tokio::test]
async fn start_without_api_server_uses_restart_cache() {
    let (dir, keep) = in_memory();
    let key = PrivateKey::generate();
    let mut last = config();
    let peer_endpoint = Some("192.0.2.7:1000".to_owned());
    last.status = Some(GatewayConfigStatus { peer_endpoint, ..Default::default() });
    keep.put(&last, &key).unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    std::fs::write(&kubeconfig, NOBODY).unwrap();
    let (sources, name) = sources(Store::kubernetes(Some(&kubeconfig)).unwrap(), keep);
    let (sender, mut inputs) = watch::channel(Input::default());
    let stop = CancellationToken::new();
    let task = tokio::spawn(run(sources, name, sender, stop.clone()));
    inputs.changed().await.unwrap();
    let input = inputs.borrow().clone();
    assert_eq!(input.desired.as_ref().unwrap().generation, 1);
    assert_eq!(input.key.as_ref().map(PrivateKey::expose), Some(key.expose()));
    assert!(input.synced && input.remembered.peer.is_some() && input.is_good());
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn cache_of_removed_peering_is_deleted() {
    let (dir, keep) = in_memory();
    keep.put(&config(), &PrivateKey::generate()).unwrap();
    let args = fabric_store::StoreArgs::directories(None, dir.path().join("run"), None);
    let (sources, name) = sources(Store::open(&args).unwrap(), keep.clone());
    let (sender, inputs) = watch::channel(Input::default());
    run(sources, name.clone(), sender, CancellationToken::new()).await.unwrap();
    assert_eq!(inputs.borrow().config, None);
    assert!(keep.read(&name).is_none());
}

/// Nobody answers there.
const NOBODY: &str = "\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: u, user: {}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
";

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
fn endpoints_are_restored_from_first_status_only() {
    let mut input = Input::default();
    let mut first = config();
    let status = |endpoint: &str, port| {
        Some(GatewayConfigStatus {
            peer_endpoint: Some(endpoint.to_owned()),
            listen_port: Some(port),
            configured_endpoint: config().spec.endpoint,
            last_initiation: Some("1970-01-01T00:00:09.000000007Z".to_owned()),
            ..Default::default()
        })
    };
    first.status = status("192.0.2.7:1000", 7);
    input.take_config(first);
    let mut second = config();
    second.metadata.generation = Some(2);
    second.status = status("192.0.2.8:1000", 8);
    input.take_config(second);
    let peer = Some("192.0.2.7:1000".parse().unwrap());
    let configured = input.desired.as_ref().unwrap().endpoint.clone();
    let stamp = Tai64n::from_unix(Duration::new(9, 7));
    let edited = Endpoint { port: 8, ..configured.clone().unwrap() };
    assert!(input.remembered.is_edited(&edited));
    assert!(!input.remembered.is_edited(configured.as_ref().unwrap()));
    assert!(!Remembered::default().is_edited(&edited), "the first gateway");
    assert_eq!(input.remembered, Remembered { peer, configured, port: Some(7), stamp });
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
