//! An API server with Configurations and ForeignClusters.

use std::path::Path;
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::logs;
use crate::replica::Replica;

const TIMEOUT: Duration = Duration::from_secs(30);
const CRDS: [&str; 2] = [
    "../../deploy/chart/crds-liqo/networking.liqo.io_configurations.yaml",
    "../../deploy/chart/crds-liqo/core.liqo.io_foreignclusters.yaml",
];
const SECRET: [&str; 4] = ["secret", "weft-webhook-certificate", "--namespace", "liqo"];

pub(crate) struct World {
    pub(crate) server: ApiServer,
    pub(crate) runtime: Runtime,
}

impl World {
    /// None, after reporting why, if there can't be one.
    pub(crate) fn start() -> Option<Self> {
        let test = std::thread::current().name().unwrap_or_default().replace(':', "-");
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("webhook").join(test);
        let server = ApiServer::start(dir).map_err(|why| skip(&why)).ok()?;
        logs::keep();
        let world = Self { server, runtime: Runtime::new().unwrap() };
        let files = CRDS.join(",");
        world.kubectl(&["apply", "-f", &files], "");
        world.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", "-f", &files], "");
        world.kubectl(&["apply", "-f", "-"], include_str!("rights.yaml"));
        for kind in ["configurations", "foreignclusters"] {
            let served = || world.server.kubectl(&["get", kind], "").is_err_and(is_empty);
            until("they are served", served);
        }
        Some(world)
    }

    /// Client with the rights of the controller.
    pub(crate) fn api(&self) -> fabric_kube_client::ApiServer {
        let controller = self.server.user("system:serviceaccount:liqo:fabric-controller");
        let _inside = self.runtime.enter();
        let namespace = Some("liqo".to_owned());
        fabric_kube_client::ApiServer::open(Some(&controller), None, namespace).unwrap()
    }

    pub(crate) fn kubectl(&self, arguments: &[&str], input: &str) -> String {
        self.server.kubectl(arguments, input).unwrap()
    }

    /// Points the API server to a replica, and waits until it trusts it.
    pub(crate) fn install(&self, replica: &Replica) {
        self.kubectl(&["apply", "-f", "-"], &installation(replica));
        self.wait_until_strings_are_taken();
    }

    pub(crate) fn wait_until_strings_are_taken(&self) {
        let string = configuration("probe", &json!("10.9.0.0/16")).to_string();
        let create = ["create", "--dry-run=server", "-f", "-"];
        until("strings are taken", || self.server.kubectl(&create, &string).is_ok());
    }

    pub(crate) fn bundle(&self) -> String {
        let path = "jsonpath={.webhooks[0].clientConfig.caBundle}";
        let arguments = ["get", "mutatingwebhookconfiguration", "weft-cidr-lists", "-o", path];
        decoded(&self.kubectl(&arguments, ""))
    }

    /// Whatever is in it; None if there is none.
    pub(crate) fn secret(&self) -> Option<Value> {
        let arguments = [&["get"], &SECRET[..], &["-o", "json", "--ignore-not-found"]].concat();
        let text = self.kubectl(&arguments, "");
        (!text.is_empty()).then(|| serde_json::from_str(&text).unwrap())
    }

    pub(crate) fn part(&self, name: &str) -> String {
        self.secret().map(|secret| decoded(secret["data"][name].as_str().unwrap())).unwrap()
    }

    pub(crate) fn write_secret(&self, parts: [(&str, &str); 3]) {
        let data = parts.map(|(name, text)| (name, BASE64_STANDARD.encode(text)));
        let patch = json!({ "data": std::collections::BTreeMap::from(data) }).to_string();
        // The API server warns of what is no certificate.
        let patch = [&["patch"], &SECRET[..], &["-p", &patch]].concat();
        let printed = self.server.kubectl(&patch, "").unwrap_or_else(|warning| warning);
        assert!(printed.contains("patched"), "{printed}");
    }

    pub(crate) fn delete_secret(&self) {
        self.kubectl(&[&["delete"], &SECRET[..]].concat(), "");
    }

    /// Checks the key as it is, as the API has it, and as Rust prints it.
    pub(crate) fn assert_no_key_was_logged(&self) {
        let logs = logs::all();
        assert!(logs.contains("the webhook serves the certificate"));
        let key = self.part("tls.key");
        let line = key.lines().nth(1).unwrap();
        let encoded = BASE64_STANDARD.encode(&key);
        let printed = format!("{:?}", line.as_bytes());
        for secret in [line, &encoded[..40], &encoded[60..100], printed.trim_matches(['[', ']'])] {
            assert!(!logs.contains(secret), "{secret}");
        }
    }
}

pub(crate) fn installation(replica: &Replica) -> String {
    include_str!("configuration.yaml").replace("ADDRESS", &replica.address.to_string())
}

pub(crate) fn configuration(name: &str, pod: &Value) -> Value {
    json!({
        "apiVersion": "networking.liqo.io/v1beta1",
        "kind": "Configuration",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "remote": { "cidr": { "pod": pod, "external": ["10.70.0.0/16"] } } }
    })
}

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < TIMEOUT, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn is_empty(printed: String) -> bool {
    printed.contains("No resources found")
}

fn decoded(text: &str) -> String {
    String::from_utf8(BASE64_STANDARD.decode(text).unwrap()).unwrap()
}
