//! Changes of running gateways, a few at a time: a version that does not come up takes no more of them with it.
//! Pure.

use std::collections::BTreeMap;

use kube::api::DynamicObject;
use serde_json::Value;

use super::live::{Key, Objects, Watched};

/// Gateways that are replaced at a time.
#[derive(Debug)]
pub(super) struct Waves {
    /// In percent of all, but one at least.
    percent: usize,
    /// Deployments that were changed, and whether they were settled before: the wave waits for those.
    changed: BTreeMap<Key, bool>,
}

impl Waves {
    pub(super) fn new(percent: u8) -> Self {
        Self { percent: percent.into(), changed: BTreeMap::new() }
    }

    /// Forgets those that are not desired any more.
    pub(super) fn keep(&mut self, is_wanted: impl Fn(&Key) -> bool) {
        self.changed.retain(|key, _| is_wanted(key));
    }

    /// Takes out of `waiting` the Deployments that may be written now: all that are new or not settled, which
    /// have nothing to lose, or were edited by the user, and of the others as many as there is room for.
    pub(super) fn next<T>(
        &mut self,
        live: &Objects,
        waiting: &mut Vec<T>,
        of: impl Fn(&T) -> (&Key, bool),
    ) -> Vec<T> {
        let mut room = self.room(live);
        let is_due = |one: &mut T| {
            let (key, is_edited) = of(one);
            let is_settled = live.get(key).is_some_and(is_settled);
            let is_free = is_edited || !is_settled;
            if !is_free && room == 0 {
                return false;
            }
            room -= usize::from(!is_free);
            self.changed.entry(key.clone()).or_insert(is_settled);
            true
        };
        waiting.extract_if(.., is_due).collect()
    }

    fn room(&mut self, live: &Objects) -> usize {
        let settled = |key: &Key| live.get(key).is_none_or(is_settled);
        self.changed.retain(|key, _| !settled(key));
        let all: Vec<_> = live.all(Watched::Deployment).collect();
        let is_awaited = |(key, deployment): &&(&Key, &DynamicObject)| {
            let is_known = self.changed.get(*key).copied();
            // The controller before this one may have begun a wave.
            let is_others = || is_changed(deployment) && !is_given_up(deployment);
            !is_settled(deployment) && is_known.unwrap_or_else(is_others)
        };
        let wave = (all.len() * self.percent / 100).max(1);
        wave.saturating_sub(all.iter().filter(is_awaited).count())
    }
}

/// True if all of its pods are those of its latest version, and ready.
fn is_settled(deployment: &DynamicObject) -> bool {
    let status = &deployment.data["status"];
    let count = |name: &str| status[name].as_i64().unwrap_or_default();
    count("observedGeneration") == deployment.metadata.generation.unwrap_or_default()
        && count("updatedReplicas") == count("replicas")
        && count("readyReplicas") > 0
        && count("unavailableReplicas") == 0
}

fn is_changed(deployment: &DynamicObject) -> bool {
    deployment.metadata.generation.is_some_and(|generation| generation > 1)
}

/// True if it has made no progress for `progressDeadlineSeconds`.
fn is_given_up(deployment: &DynamicObject) -> bool {
    let conditions = deployment.data["status"]["conditions"].as_array().into_iter().flatten();
    let mut reasons = conditions.map(|condition: &Value| &condition["reason"]);
    reasons.any(|reason| reason == "ProgressDeadlineExceeded")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: usize) -> Key {
        Key::new(Watched::Deployment, "tenant", &format!("gw-{name}"))
    }

    /// Puts a Deployment of that generation: `ready` of its pods, all of the generation `observed`.
    fn put(live: &mut Objects, name: usize, [generation, observed, ready]: [i64; 3]) {
        let version = live.get(&key(name)).and_then(|of| of.metadata.resource_version.clone());
        let version = version.map_or(1, |version| version.parse::<u64>().unwrap() + 1);
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": format!("gw-{name}"), "namespace": "tenant", "uid": "u",
                "generation": generation, "resourceVersion": version.to_string()},
            "status": {"observedGeneration": observed, "replicas": 1, "updatedReplicas": 1,
                "readyReplicas": ready, "unavailableReplicas": 1 - ready}});
        live.put(Watched::Deployment, serde_json::from_value(deployment).unwrap());
    }

    fn settled(count: usize) -> (Objects, Vec<Key>) {
        let mut live = Objects::default();
        (0..count).for_each(|name| put(&mut live, name, [1, 1, 1]));
        (live, (0..count).map(key).collect())
    }

    fn next(waves: &mut Waves, live: &Objects, waiting: &mut Vec<Key>) -> usize {
        waves.next(live, waiting, |key| (key, false)).len()
    }

    #[test]
    fn tenth_is_replaced_at_a_time() {
        let (mut live, mut waiting) = settled(25);
        let mut waves = Waves::new(10);
        assert_eq!(next(&mut waves, &live, &mut waiting), 2);
        put(&mut live, 0, [2, 1, 1]);
        put(&mut live, 1, [2, 2, 0]);
        assert_eq!(next(&mut waves, &live, &mut waiting), 0, "neither has come up");
        put(&mut live, 1, [2, 2, 1]);
        assert_eq!(next(&mut waves, &live, &mut waiting), 1);
        assert_eq!(waiting.len(), 22);
        // Another process goes on with the wave.
        let mut waves = Waves::new(10);
        put(&mut live, 2, [2, 2, 0]);
        assert_eq!(next(&mut waves, &live, &mut waiting), 0);
    }

    #[test]
    fn writes_that_change_nothing_hold_nobody_up() {
        let (live, mut waiting) = settled(25);
        let mut waves = Waves::new(10);
        while !waiting.is_empty() {
            assert!(next(&mut waves, &live, &mut waiting) > 0);
        }
    }

    #[test]
    fn gateway_that_was_lost_before_holds_nobody_up() {
        let (mut live, mut waiting) = settled(3);
        put(&mut live, 0, [1, 1, 0]);
        let mut waves = Waves::new(10);
        assert_eq!(waves.next(&live, &mut waiting, |key| (key, false)), [key(0), key(1)]);
        put(&mut live, 0, [2, 2, 0]);
        put(&mut live, 1, [2, 2, 1]);
        assert_eq!(next(&mut waves, &live, &mut waiting), 1);
    }

    #[test]
    fn edited_gateway_does_not_wait() {
        let (mut live, mut waiting) = settled(3);
        let mut waves = Waves::new(10);
        assert_eq!(next(&mut waves, &live, &mut waiting), 1);
        put(&mut live, 0, [2, 2, 0]);
        assert_eq!(waves.next(&live, &mut waiting, |of| (of, *of == key(2))), [key(2)]);
        // The stuck one itself can be repaired.
        assert_eq!(next(&mut waves, &live, &mut vec![key(0)]), 1);
    }
}
