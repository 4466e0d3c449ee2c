//! Installation, upgrade and uninstallation of weft and of Liqo's own chart in every order.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::helm::MIN_VALUES;
use crate::life::{Release, liqos_chart};
use crate::uninstall::uninstall;

const WITH_CRDS: &str = "crds: {liqo: auto, weft: auto}";
const LIQOS_VALUES: [&str; 6] = [
    "--set=tag=v1.2.0",
    "--set=networking.enabled=false",
    "--set=discovery.config.clusterID=rome",
    "--set=ipam.podCIDRs={10.200.0.0/16}",
    "--set=ipam.serviceCIDR=10.96.0.0/12",
    "--set=metricAgent.enabled=false",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chart {
    Weft,
    Liqo,
}

#[test]
fn releases_in_any_order_lose_no_shared_object() {
    let Some(release) = Release::prepare() else { return };
    let Some(chart) = liqos_chart() else { return };
    for first in [Chart::Weft, Chart::Liqo] {
        for last in [Chart::Weft, Chart::Liqo] {
            Order { release: &release, chart: &chart, first, last }.play();
        }
    }
}

struct Order<'a> {
    release: &'a Release,
    /// Folder of Liqo's chart.
    chart: &'a Path,
    /// Chart that is installed first.
    first: Chart,
    /// Chart that is uninstalled last.
    last: Chart,
}

impl Order<'_> {
    fn play(&self) {
        let what = format!("{:?} first, {:?} last", self.first, self.last);
        self.install(self.first);
        let before = self.shared();
        let id = ("clusterid-configmap".to_owned(), "rome".to_owned());
        assert_eq!(before.len(), 5, "{what}: {before:?}");
        assert!(before.contains_key(&id), "{what}: {before:?}");
        self.install(self.first.other());
        for chart in [Chart::Weft, Chart::Liqo, Chart::Weft] {
            self.upgrade(chart);
        }
        assert_eq!(self.shared(), before, "{what}, upgraded");
        self.uninstall(self.last.other());
        if self.last == Chart::Weft {
            // The fabric-controller, which puts them back, does not run here.
            self.upgrade(Chart::Weft);
            assert!(self.shared().into_keys().eq(before.into_keys()), "{what}");
        } else {
            assert_eq!(self.shared(), before, "{what}, without weft");
        }
        self.uninstall(self.last);
        assert_eq!(self.shared(), BTreeMap::new(), "{what}, without both");
    }

    fn install(&self, chart: Chart) {
        match chart {
            Chart::Weft => drop(self.release.helm("install", &[MIN_VALUES, WITH_CRDS]).unwrap()),
            Chart::Liqo => {
                self.of_liqo("install", &["--create-namespace", "--take-ownership"]);
                // They would refuse all, as nothing answers here.
                let webhooks = "validatingwebhookconfigurations,mutatingwebhookconfigurations";
                let theirs = "app.kubernetes.io/part-of=liqo";
                let delete = ["delete", webhooks, "--selector", theirs];
                self.release.server.kubectl(&delete, "").unwrap();
            }
        }
    }

    fn upgrade(&self, chart: Chart) {
        match chart {
            Chart::Weft => drop(self.release.helm("upgrade", &[MIN_VALUES, WITH_CRDS]).unwrap()),
            Chart::Liqo => self.of_liqo("upgrade", &["--reuse-values"]),
        }
    }

    fn of_liqo(&self, verb: &str, more: &[&str]) {
        let chart = self.chart.display().to_string();
        let line = [&[verb, "liqo", &chart][..], &LIQOS_VALUES, more].concat();
        self.release.plain(&line);
    }

    fn uninstall(&self, chart: Chart) {
        match chart {
            Chart::Weft => uninstall(self.release),
            Chart::Liqo => drop(self.release.plain(&["uninstall", "liqo", "--no-hooks"])),
        }
    }

    /// Uids of the cluster's ID and own Networks, by type and value.
    fn shared(&self) -> BTreeMap<(String, String), Value> {
        let list = ["get", "configmaps,networks", "--namespace=liqo", "--output=json"];
        let list = self.release.server.kubectl(&list, "").unwrap();
        let list: Value = serde_json::from_str(&list).unwrap();
        let shared = |object: &Value| {
            let metadata = &object["metadata"];
            let labels = &metadata["labels"];
            let (of, value) = match object["kind"].as_str()? {
                "Network" => (&labels["ipam.liqo.io/network-type"], &object["spec"]["cidr"]),
                _ => (&labels["app.kubernetes.io/name"], &object["data"]["CLUSTER_ID"]),
            };
            Some(((of.as_str()?.to_owned(), value.as_str()?.to_owned()), metadata["uid"].clone()))
        };
        list["items"].as_array().unwrap().iter().filter_map(shared).collect()
    }
}

impl Chart {
    fn other(self) -> Self {
        match self {
            Self::Weft => Self::Liqo,
            Self::Liqo => Self::Weft,
        }
    }
}
