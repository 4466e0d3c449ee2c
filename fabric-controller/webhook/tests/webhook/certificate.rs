//! One certificate for all replicas, whatever happens to it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use serde_json::{Value, json};

use crate::replica::{Replica, der};
use crate::world::{World, configuration, installation, until};

#[test]
fn replicas_share_one_certificate() {
    let Some(world) = World::start() else { return };
    let replicas = [Replica::start(&world), Replica::start(&world)];
    made_once(&world, &replicas);
    made_again_once(&world, &replicas);
    nonsense_is_replaced(&world, &replicas);
    overwritten_authorities_are_written_again(&world, &replicas);
    renewed_while_strings_are_written(&world, &replicas);
    world.assert_no_key_was_logged();
    replicas.into_iter().for_each(|replica| replica.stop(&world));
}

/// Both observe at one moment that there is something to do.
fn made_once(world: &World, replicas: &[Replica; 2]) {
    assert_eq!(world.secret(), None);
    world.install(&replicas[0]);
    let secret = world.secret().unwrap();
    assert_eq!(secret["type"], json!("kubernetes.io/tls"));
    let owner = &secret["metadata"]["ownerReferences"][0];
    assert_eq!(owner["name"], json!("weft-cidr-lists"));
    settled(world, replicas);
    thread::sleep(Duration::from_secs(3));
    assert_eq!(world.secret(), Some(secret));
}

fn made_again_once(world: &World, replicas: &[Replica; 2]) {
    for _ in 0..3 {
        let before = world.part("tls.crt");
        world.delete_secret();
        until("it is made again", || world.secret().is_some());
        assert_ne!(world.part("tls.crt"), before);
        let resource = |secret: &Value| secret["metadata"]["resourceVersion"].clone();
        let version = resource(&world.secret().unwrap());
        settled(world, replicas);
        assert_eq!(resource(&world.secret().unwrap()), version);
    }
}

/// Certificates stored, trusted and presented are the same.
fn settled(world: &World, replicas: &[Replica; 2]) {
    until("all have the same", || {
        let (own, authorities) = (der(&world.part("tls.crt")), world.part("ca.crt"));
        let presented = |replica: &Replica| replica.presents(world, &authorities);
        world.bundle() == authorities
            && replicas.iter().all(|replica| presented(replica).as_ref() == Some(&own))
    });
    world.wait_until_strings_are_taken();
}

fn nonsense_is_replaced(world: &World, replicas: &[Replica; 2]) {
    let [crt, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| world.part(name));
    let other = Due::make("127.0.0.1", 364);
    let elsewhere = Due::make("192.0.2.1", 1);
    let cases = [
        [("tls.crt", "no certificate"), ("tls.key", "no key"), ("ca.crt", "no authority")],
        [("tls.crt", &crt), ("tls.key", &other.key), ("ca.crt", &ca)],
        [("tls.crt", &crt), ("tls.key", &key), ("ca.crt", &other.authority)],
        [
            ("tls.crt", &elsewhere.certificate),
            ("tls.key", &elsewhere.key),
            ("ca.crt", &elsewhere.authority),
        ],
    ];
    for parts in cases {
        world.write_secret(parts);
        until("it is replaced", || ![parts[0].1, &crt].contains(&world.part("tls.crt").as_str()));
        settled(world, replicas);
        assert!(!world.bundle().contains(parts[2].1));
    }
}

/// Overwrites them as an upgrade of the chart does, and by hand.
fn overwritten_authorities_are_written_again(world: &World, replicas: &[Replica; 2]) {
    let bundle = world.bundle();
    let empty = installation(&replicas[0]);
    let chart = empty.replace("clientConfig: {", "clientConfig: { caBundle: \"\",");
    assert_ne!(empty, chart);
    let other = json!([{
        "op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": "eA=="
    }])
    .to_string();
    let hand = ["mutatingwebhookconfiguration", "weft-cidr-lists", "--type=json", "-p", &other];
    for _ in 0..2 {
        world.kubectl(&["replace", "-f", "-"], &chart);
        until("it is written again", || world.bundle() == bundle);
        let _ = world.server.kubectl(&[&["patch"], &hand[..]].concat(), "");
        until("it is written again", || world.bundle() == bundle);
    }
    world.wait_until_strings_are_taken();
}

/// The certificate that is served came of age. Its authority is the one that the API server trusts,
/// and goes on being trusted until all serve the new one.
fn renewed_while_strings_are_written(world: &World, replicas: &[Replica; 2]) {
    let old = world.part("tls.crt");
    let due = Due::make("127.0.0.1", 250);
    let authorities = world.part("ca.crt") + &due.authority;
    let parts = [("tls.crt", &*due.certificate), ("tls.key", &due.key), ("ca.crt", &authorities)];
    let (over, taken) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            while !over.load(Ordering::Relaxed) && began.elapsed() < Duration::from_secs(60) {
                let string = configuration("probe", &json!("10.9.0.0/16")).to_string();
                world.kubectl(&["create", "--dry-run=server", "-f", "-"], &string);
                taken.fetch_add(1, Ordering::Relaxed);
            }
        });
        world.write_secret(parts);
        until("it is renewed", || ![&old, &due.certificate].contains(&&world.part("tls.crt")));
        until("both are trusted", || world.bundle().matches("BEGIN").count() == 2);
        let authorities = world.bundle();
        for replica in replicas {
            assert_eq!(replica.presents(world, &authorities), Some(der(&old)), "too early");
        }
        settled(world, replicas);
        over.store(true, Ordering::Relaxed);
    });
    assert!(taken.load(Ordering::Relaxed) > 2, "{taken:?}");
}

/// A certificate that was made some days ago, for a year.
struct Due {
    authority: String,
    certificate: String,
    key: String,
}

impl Due {
    fn make(address: &str, days_ago: u64) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let mut params = CertificateParams::new([address.to_owned()]).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let day = Duration::from_secs(86_400);
        let made = now - day * u32::try_from(days_ago).unwrap();
        params.not_before = date_time_ymd(1970, 1, 1) + made;
        params.not_after = date_time_ymd(1970, 1, 1) + made + day * 365;
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap().pem();
        Self { authority: authority.pem(), certificate, key: key.serialize_pem() }
    }
}
