//! An API server that is away, or hangs.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use api_server::skip;
use fabric_api::ipam::{Network, NetworkSpec};
use fabric_store::{Event, Kind, Object, Store};
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::admin::Admin;
use crate::{NamespaceWatch, Place, applied, problems};

/// Time until the watch is back, once the server is: the longest wait, and some.
const BACK: Duration = Duration::from_secs(15);

fn network(name: &str) -> Object {
    let spec = NetworkSpec { cidr: "10.1.0.0/16".to_owned(), ..NetworkSpec::default() };
    let mut network = Network::new(name, spec);
    network.metadata.namespace = Some("outage".to_owned());
    network.into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_while_the_server_is_away() {
    let server = match crate::start("outage") {
        Ok(server) => server,
        Err(why) => return skip(&why),
    };
    let kubeconfig = server.admin();
    let admin = Admin::new(&kubeconfig);
    admin.define_everything().await;
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "outage"}});
    admin.apply("namespaces", &namespace).await;
    let store = Store::kubernetes(Some(&kubeconfig)).unwrap();
    let mut watch = NamespaceWatch::new(store.watch(&[Kind::Network]).unwrap(), "outage");
    watch.sync().await;
    for name in ["goes", "stays"] {
        store.put(&network(name)).await.unwrap();
        assert_eq!(applied(watch.next().await).name(), name);
    }

    // Frozen, it takes connections and does not answer.
    server.freeze(true);
    let began = Instant::now();
    let error = store.put(&network("late")).await.unwrap_err();
    assert!(error.is_unreachable(), "{error:?}");
    let took = began.elapsed();
    assert!(took > Duration::from_secs(4) && took < Duration::from_secs(7), "{took:?}");
    server.freeze(false);
    store.put(&network("late")).await.unwrap();
    assert_eq!(applied(watch.next().await).name(), "late");

    server.kill();
    let began = Instant::now();
    let error = store.put(&network("never")).await.unwrap_err();
    assert!(error.is_unreachable() && began.elapsed() < Duration::from_secs(1), "{error:?}");
    let chain = Chain(&error).to_string();
    assert!(
        chain.starts_with("cannot write Network outage/never: the API server cannot be reached: "),
        "{chain}"
    );
    assert!(chain.contains("refused"), "{chain}");
    assert!(store.put(&network("stays")).await.is_ok(), "that needs no answer");
    let reported = watch.next_within(BACK).await.unwrap();
    assert!(problems(reported)[0].contains("cannot be reached"));
    watch.quiet().await;
    assert_eq!(watch.watch.seen().len(), 3, "nothing counts as gone");

    server.resume();
    // Once it is back, another program comes first.
    let other = Store::kubernetes(Some(&kubeconfig)).unwrap();
    until_found(&other).await;
    other.delete(&network("goes").reference()).await.unwrap();
    other.put(&network("comes")).await.unwrap();
    let (mut gone, mut came) = (false, false);
    let began = Instant::now();
    while !(gone && came) {
        assert!(began.elapsed() < BACK);
        match watch.next_within(BACK).await.unwrap() {
            Event::Applied(object) => came |= object.name() == "comes",
            Event::Deleted(object) => {
                assert_eq!(object.name, "goes");
                gone = true;
            }
            Event::Problems(_) | Event::Synced => {}
        }
    }
    server.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_without_news_works_again_with_its_way() {
    let Some(place) = Place::new("cable").await else { return };
    let kubeconfig = fs::read_to_string(place.server.admin()).unwrap();
    let (before, rest) = kubeconfig.split_once("https://127.0.0.1:").unwrap();
    let (port, after) = rest.split_once('\'').unwrap();
    let cable = Cable::lay(port.parse().unwrap()).await;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("store/cable.kubeconfig");
    fs::write(&path, format!("{before}https://{}'{after}", cable.near)).unwrap();
    let store = Store::kubernetes(Some(&path)).unwrap();
    let mut watch = place.watch(&store, &[Kind::GatewayRecord]);
    watch.sync().await;

    let is_cut = |is| cable.is_cut.send_replace(is);
    is_cut(true);
    let reported = problems(watch.next_within(BACK).await.unwrap());
    assert!(reported[0].contains("cannot be reached"), "{reported:?}");
    is_cut(false);
    let solved = watch.next_within(Duration::from_secs(5)).await.map(problems);
    assert_eq!(solved, Some(Vec::new()), "it is tried again after two seconds at the latest");

    // Each for so long that the watch fails, and not for so long that it is reported.
    for _ in 0..5 {
        is_cut(true);
        sleep(Duration::from_secs(1)).await;
        is_cut(false);
        assert!(watch.next_within(Duration::from_secs(4)).await.is_none());
    }
}

/// Connections to a server on this host, which can be cut.
struct Cable {
    near: SocketAddr,
    is_cut: watch::Sender<bool>,
}

impl Cable {
    async fn lay(far: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let near = listener.local_addr().unwrap();
        let (cut, is_cut) = watch::channel(false);
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let mut is_cut = is_cut.clone();
                tokio::spawn(async move {
                    if *is_cut.borrow() {
                        return;
                    }
                    let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, far)).await.unwrap();
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => {}
                        _ = is_cut.wait_for(|is| *is) => {}
                    }
                });
            }
        });
        Self { near, is_cut: cut }
    }
}

/// A server that starts serves its custom resources a moment later.
async fn until_found(store: &Store) {
    let began = Instant::now();
    while !matches!(store.get(&network("goes").reference()).await, Ok(Some(_))) {
        assert!(began.elapsed() < BACK, "the server has lost it");
        sleep(Duration::from_millis(100)).await;
    }
}

struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}
