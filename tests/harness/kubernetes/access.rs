//! Rights of service accounts, as the API server reports them.

use anyhow::{Context, Result, ensure};
use serde_json::{Deserializer, Value, json};

use super::{DIR, Kubernetes, control_plane};

/// Number of requests that kubectl makes at once.
const BURST: usize = 10;

impl Kubernetes {
    /// Answers to these [`access_review`]s: true if the request is allowed.
    pub fn may(&self, reviews: &[Value]) -> Result<Vec<bool>> {
        std::thread::scope(|scope| {
            let answer = |some| scope.spawn(move || self.answers(some));
            let threads: Vec<_> = reviews.chunks(BURST).map(answer).collect();
            let answers = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            Ok(answers.collect::<Result<Vec<_>>>()?.concat())
        })
    }

    fn answers(&self, reviews: &[Value]) -> Result<Vec<bool>> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": reviews}).to_string();
        let create = ["create", "--filename=-", "--output=json"];
        let text = self.head().host.command(self.tool("kubectl").args(create), &list)?;
        let answers = Deserializer::from_str(&text).into_iter::<Value>();
        let answers = answers.collect::<Result<Vec<_>, _>>().context("kubectl prints JSON")?;
        ensure!(answers.len() == reviews.len(), "{} answers: {text}", answers.len());
        Ok(answers.iter().map(|review| review["status"]["allowed"] == true).collect())
    }

    /// Runs `kubectl` with a token of a service account, `NAMESPACE:NAME`, and nothing else.
    pub fn kubectl_as(&self, account: &str, args: &[&str]) -> Result<String> {
        let (namespace, name) = account.split_once(':').context("an account has a namespace")?;
        let token = self.kubectl(&["create", "token", name, "--namespace", namespace])?;
        let mut kubectl = self.tool("kubectl");
        kubectl.args(["--kubeconfig=/dev/null", &format!("--token={}", token.trim())]);
        kubectl.arg(format!("--server={}", control_plane::url(&self.spec)));
        kubectl.arg(format!("--certificate-authority={DIR}/ca.crt")).args(args);
        self.head().host.command(&mut kubectl, "")
    }
}

/// The question whether a service account, `NAMESPACE:NAME`, may do something in a namespace:
/// `VERB RESOURCE[.GROUP][/SUBRESOURCE][ NAME]`.
pub fn access_review(account: &str, namespace: &str, what: &str) -> Value {
    let mut words = what.split(' ');
    let mut word = || words.next().unwrap_or_default();
    let (verb, resource, name) = (word(), word(), word());
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
    json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {
            "user": format!("system:serviceaccount:{account}"),
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": {"verb": verb, "resource": resource, "group": group, "name": name,
                "subresource": subresource, "namespace": namespace},
        },
    })
}
