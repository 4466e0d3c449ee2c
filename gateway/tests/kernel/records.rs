//! A gateway whose config follows from GatewayRecords.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fabric_api::fabric::{
    GatewayClusterRecord, GatewayConfig, GatewayConfigSpec, GatewayRecord, GatewayRecordSpec,
    NodeRecord, Record as _, RecordVersion, digest,
};
use fabric_api::networking::ConnectionValue;

use crate::side::{Side, at_once, in_two_hosts, reaches};

#[test]
fn packets_follow_records_over_a_restart_too() {
    in_two_hosts(|rome, milan| {
        let spec = &rome.config.spec;
        let first = put_records(rome, spec);
        let (client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        rome.until("acknowledgement", || rome.status().records.as_ref() == Some(&first));
        let own = GatewayConfig { spec: spec.own_part(), ..rome.config.clone() };
        let generation = at_once(rome.store.put(&own.into())).unwrap().generation();
        rome.until("own part", || rome.status().applied_generation == generation);
        assert!(reaches(rome));
        let mut without = spec.clone();
        without.nodes[0].prefixes.clear();
        put_records(rome, &without);
        rome.until("no way to the pod", || !reaches(rome));
        put_records(rome, spec);
        rome.until("a way to the pod", || reaches(rome));
        drop(client);
        let mut again = rome.start();
        rome.until("a way to the pod after a restart", || reaches(rome));
        again.stop();
        assert_eq!(rome.status().records, None, "the next one may be older");
        let _third = rome.start();
        rome.until("acknowledgement", || rome.status().records.is_some());
        assert_eq!(rome.status().problems, [] as [&str; 0]);
    });
}

#[test]
fn gateway_is_ready_once_its_newest_config_is_whole() {
    in_two_hosts(|rome, _| {
        let own = GatewayConfig { spec: rome.config.spec.own_part(), ..rome.config.clone() };
        let newest = at_once(rome.store.put(&own.into())).unwrap().generation();
        let _gateway = rome.start();
        rome.until("a socket", || UnixStream::connect(rome.socket()).is_ok());
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(2) {
            assert_eq!(rome.probe("/readyz"), 503, "without its records");
            std::thread::sleep(Duration::from_millis(50));
        }
        put_records(rome, &rome.config.spec);
        rome.until("readiness", || rome.is_ready());
        assert_eq!(rome.status().applied_generation, newest);
    });
}

/// Publishes records that the config follows from.
fn put_records(side: &Side, whole: &GatewayConfigSpec) -> RecordVersion {
    let nodes = whole.nodes.iter().map(|node| {
        let record = NodeRecord {
            name: node.name.clone(),
            overlay: node.overlay,
            mac: node.mac.clone(),
            underlay: vec![node.underlay],
            prefixes: node.prefixes.clone(),
        };
        let spec = GatewayRecordSpec { node: Some(record), cluster: None };
        put(side, &GatewayRecord::name_of(&node.name), spec)
    });
    let cluster = GatewayClusterRecord {
        digest: digest(&nodes.collect::<Vec<_>>()),
        pod_cidrs: whole.pod_cidrs.clone(),
        external_cidrs: whole.external_cidrs.clone(),
        ips: whole.ips.clone(),
        icmp_sources: whole.icmp_sources.clone(),
        peers: Vec::new(),
        egress: whole.egress.clone(),
    };
    let spec = GatewayRecordSpec { cluster: Some(cluster), node: None };
    put(side, GatewayRecord::CLUSTER, spec).version().unwrap()
}

fn put(side: &Side, name: &str, spec: GatewayRecordSpec) -> GatewayRecord {
    let stored = at_once(side.store.put(&GatewayRecord::new(name, spec).into())).unwrap();
    GatewayRecord::try_from(stored).unwrap()
}
