//! Tokens of service accounts.

use api_server::{ApiServer, skip};
use ipam_proto::NetworkAvailableRequest;
use tonic::{Code, Request};

use crate::Ipam;

impl Ipam {
    /// Answer to a request. There are no Networks here, so none is granted.
    async fn answer(&self, token: Option<&str>) -> Code {
        let mut request = Request::new(NetworkAvailableRequest { cidr: "10.0.0.0/8".to_owned() });
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        let answer = self.client().await.network_is_available(request).await;
        answer.err().map_or(Code::Ok, |status| status.code())
    }
}

#[tokio::test]
async fn accounts_of_other_namespaces_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = match ApiServer::start(dir.path().join("server")) {
        Ok(server) => server,
        Err(why) => return skip(&why),
    };
    for line in [
        "create namespace liqo",
        "create serviceaccount client --namespace=liqo",
        "create serviceaccount client --namespace=default",
    ] {
        server.kubectl(&line.split(' ').collect::<Vec<_>>(), "").unwrap();
    }
    let token = |namespace: &str, audience: &str| {
        let (namespace, audience) =
            (format!("--namespace={namespace}"), format!("--audience={audience}"));
        let create = ["create", "token", "client", &namespace, &audience];
        server.kubectl(&create, "").unwrap().trim().to_owned()
    };
    let own = token("liqo", "weft-ipam");
    let default = Ipam::start(&server, dir.path(), "default.sock", &[]);
    let strict = Ipam::start(&server, dir.path(), "strict.sock", &["--require-token"]);
    assert_ne!(default.answer(None).await, Code::Unauthenticated);
    assert_eq!(strict.answer(None).await, Code::Unauthenticated);
    for ipam in [&default, &strict] {
        for _ in 0..2 {
            assert_ne!(ipam.answer(Some(&own)).await, Code::Unauthenticated);
        }
        for other in [
            token("default", "weft-ipam"),
            token("liqo", "https://kubernetes.default.svc"),
            "no token".to_owned(),
        ] {
            assert_eq!(ipam.answer(Some(&other)).await, Code::Unauthenticated);
        }
    }
}
