//! Networking in the status of a ForeignCluster, for each of its writers.

use serde_json::{Value, json};

use crate::replica::Replica;
use crate::world::World;

const WEFT: &str = "--field-manager=weft-fabric-controller";
const LIQO: &str = "--field-manager=liqo-controller-manager";

#[test]
fn networking_stays_as_weft_wrote_it() {
    let Some(world) = World::start() else { return };
    let replica = Replica::start(&world);
    world.install(&replica);
    let milan = json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
        "metadata": {"name": "milan"}, "spec": {"clusterID": "milan"}});
    world.kubectl(&["create", "-f", "-"], &milan.to_string());

    let off = json!({"enabled": false});
    let cleared = |role: &str| {
        let modules = json!({"networking": {"enabled": false, "conditions": null},
            "authentication": {"enabled": true}, "offloading": off});
        json!({"role": role, "modules": modules})
    };
    let status = write(&world, LIQO, &cleared("Unknown"));
    assert_eq!(status["modules"]["networking"], off, "weft has not written any yet");

    let condition = json!({"type": "NetworkConnectionStatus", "status": "Established"});
    let on = json!({"enabled": true, "conditions": [condition]});
    let status = write(&world, WEFT, &json!({"modules": {"networking": on}}));
    assert_eq!(status["modules"]["networking"], on);

    let status = write(&world, LIQO, &cleared("Consumer"));
    assert_eq!(status["modules"]["networking"], on, "Liqo cleared it");
    assert_eq!(status["role"], "Consumer", "all else is as Liqo wrote it");
    assert_eq!(status["modules"]["authentication"]["enabled"], true);

    let status = write(&world, WEFT, &json!({"modules": {"networking": off}}));
    assert_eq!(status["modules"]["networking"]["enabled"], false, "weft may switch it off");
    replica.stop(&world);
    let status = write(&world, LIQO, &cleared("Provider"));
    assert_eq!(status["role"], "Provider", "without a replica, writes go on");
}

/// Merges that into the status; returns what is stored.
fn write(world: &World, manager: &str, status: &Value) -> Value {
    let patch = json!({ "status": status }).to_string();
    let what = ["patch", "foreigncluster", "milan", "--subresource=status", "--type=merge"];
    let how = [manager, "-o", "json", "-p", &patch];
    let stored = world.kubectl(&[&what[..], &how[..]].concat(), "");
    serde_json::from_str::<Value>(&stored).unwrap()["status"].take()
}
