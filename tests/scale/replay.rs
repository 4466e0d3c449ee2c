//! The same writes without weft: what the audit log has, sent to an API server of its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use api_server::ApiServer;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::audit::{AuditLog, SentWrite};
use crate::lab;
use crate::users::User;

/// A patch that is applied, among the verbs.
const APPLY: &str = "apply";
/// Connections that write at a time.
const CONNECTIONS: usize = 16;

/// Result of the writes of a stretch of time.
#[derive(Clone, Debug)]
pub struct ReplayOutcome {
    pub took: Duration,
    pub writes: usize,
    /// Sum of all bodies.
    pub bytes: usize,
    pub failed: usize,
    /// One of the failures.
    pub error: Option<String>,
}

/// A request whose body is ready to be sent.
struct Prepared {
    verb: String,
    uri: String,
    body: Vec<u8>,
}

/// Sends the writes up to `from` to a new API server in order to have the same objects there, then
/// those between `from` and `to` as fast as it takes them. Objects of one namespace are written in
/// order, others side by side.
pub async fn replay(
    log: &AuditLog,
    (from, to): (u64, u64),
    server: Arc<ApiServer>,
) -> Result<ReplayOutcome> {
    let (before, timed) = (log.writes_between(0, from)?, log.writes_between(from, to)?);
    let defining = Arc::clone(&server);
    tokio::task::spawn_blocking(move || lab::define_kinds(&defining)).await??;
    let failed = send_all(before, &server).await?;
    eprintln!("  {} writes to begin with, {} failed", failed.writes, failed.failed);
    send_all(timed, &server).await
}

async fn send_all(writes: Vec<SentWrite>, server: &ApiServer) -> Result<ReplayOutcome> {
    let mut queues: BTreeMap<String, Vec<Prepared>> = BTreeMap::new();
    let (count, mut bytes) = (writes.len(), 0);
    for write in writes {
        let object = object_of(&write);
        let prepared = prepare(write)?;
        bytes += prepared.body.len();
        queues.entry(object).or_default().push(prepared);
    }
    let mut shares: Vec<Vec<Vec<Prepared>>> = Vec::new();
    shares.resize_with(CONNECTIONS, Vec::new);
    for (i, queue) in queues.into_values().enumerate() {
        shares[i % CONNECTIONS].push(queue);
    }
    let clients = (0..CONNECTIONS).map(|_| User::Admin.client(server));
    let clients = clients.collect::<Result<Vec<Client>>>()?;
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for (client, share) in clients.into_iter().zip(shares) {
        tasks.spawn(send_share(client, share));
    }
    let errors: Vec<String> = tasks.join_all().await.into_iter().flatten().collect();
    Ok(ReplayOutcome {
        took: start.elapsed(),
        writes: count,
        bytes,
        failed: errors.len(),
        error: errors.into_iter().next(),
    })
}

async fn send_share(client: Client, share: Vec<Vec<Prepared>>) -> Vec<String> {
    let mut errors = Vec::new();
    for prepared in share.into_iter().flatten() {
        let what = format!("{} {}", prepared.verb, prepared.uri);
        if let Err(error) = send(&client, prepared).await {
            errors.push(format!("{what}: {error:#}"));
        }
    }
    errors
}

async fn send(client: &Client, prepared: Prepared) -> Result<()> {
    let (root, nothing) = (Request::new("/"), json!({}));
    let Prepared { verb, uri, body } = prepared;
    let request = match verb.as_str() {
        "create" => root.create(&PostParams::default(), Vec::new()),
        "update" => root.replace("x", &PostParams::default(), Vec::new()),
        "delete" => root.delete("x", &DeleteParams::default()),
        APPLY => root.patch("x", &PatchParams::apply("x"), &Patch::Apply(nothing)),
        "patch" => root.patch("x", &PatchParams::default(), &Patch::Merge(nothing)),
        other => anyhow::bail!("the verb {other} is not replayed"),
    };
    let mut request = request.context("cannot make a request")?;
    *request.uri_mut() = uri.parse().context("not a URI")?;
    *request.body_mut() = body;
    client.request_text(request).await.map(drop).context("refused")
}

/// Objects with the same key are written in order: those of one namespace, and itself.
fn object_of(write: &SentWrite) -> String {
    let path = write.uri.split('?').next().unwrap_or_default();
    let path = path.trim_end_matches("/status").to_owned();
    let name = write.request_object.as_ref().and_then(|body| body.pointer("/metadata/name"));
    let path = match name.and_then(Value::as_str) {
        Some(name) if write.verb == "create" => format!("{path}/{name}"),
        Some(_) | None => path,
    };
    match path.split_once("/namespaces/") {
        // Namespaces other than those of peerings have objects that do not depend on each other.
        Some((_, rest)) if rest.starts_with("liqo-tenant-") => {
            rest.split('/').next().unwrap_or_default().to_owned()
        }
        Some(_) | None => path,
    }
}

fn prepare(write: SentWrite) -> Result<Prepared> {
    let SentWrite { verb, uri, request_object } = write;
    // Versions and uids are those of another server.
    let mut body = request_object.unwrap_or(Value::Null);
    for field in ["resourceVersion", "uid"] {
        if let Some(metadata) = body.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove(field);
        }
        if let Some(conditions) = body.get_mut("preconditions").and_then(Value::as_object_mut) {
            conditions.remove(field);
        }
    }
    // Patches that merge may have a field manager, too, but name no kind.
    let is_applied = verb == "patch" && body.get("apiVersion").is_some();
    let verb = if is_applied { APPLY.to_owned() } else { verb };
    let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body)? };
    Ok(Prepared { verb, uri, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_without_a_kind_is_merged() {
        let verb = |body: Value| {
            let (verb, uri) = ("patch".to_owned(), "/x?fieldManager=weft".to_owned());
            prepare(SentWrite { verb, uri, request_object: Some(body) }).unwrap().verb
        };
        assert_eq!(verb(json!({"apiVersion": "v1", "kind": "Node"})), APPLY);
        assert_eq!(verb(json!({"status": {"modules": {}}})), "patch");
    }

    #[test]
    fn writes_of_one_tenant_stay_in_order() {
        let key = |uri: &str| {
            let (verb, uri) = ("patch".to_owned(), uri.to_owned());
            object_of(&SentWrite { verb, uri, request_object: None })
        };
        let namespace = key("/api/v1/namespaces/liqo-tenant-peer-1?fieldManager=kubectl");
        assert_eq!(namespace, key("/api/v1/namespaces/liqo-tenant-peer-1/pods/gw-0/status"));
        let node = "/apis/fabric.weft.dev/v1alpha1/nodeconfigs/n1";
        assert_eq!(key(node), key(&format!("{node}/status?force=true")));
        assert_ne!(key(node), key("/apis/fabric.weft.dev/v1alpha1/nodeconfigs/n2"));
        let verb = "create".to_owned();
        let uri = "/apis/fabric.weft.dev/v1alpha1/nodeconfigs?fieldManager=weft".to_owned();
        let request_object = Some(json!({"metadata": {"name": "n1"}}));
        assert_eq!(object_of(&SentWrite { verb, uri, request_object }), node);
    }
}
