//! Answers of the API server to requests, and the errors made of them.

use std::time::Duration;

use fabric_objects::Kind;
use tokio::time::timeout;
use tower::timeout::error::Elapsed;

use crate::error::ApiError;

/// Time limit of a whole request; of a watch, until it begins.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Result of a request about an object of that kind, within the time limit.
pub(crate) async fn answer<T>(
    kind: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiError> {
    match timeout(TIMEOUT, request).await {
        Ok(answer) => answer.map_err(|error| api_error(kind, error)),
        Err(_) => Err(ApiError::Timeout { seconds: TIMEOUT.as_secs() }),
    }
}

/// Omits the API server's message about a Secret, which may quote it.
pub(crate) fn api_error(kind: &str, error: kube::Error) -> ApiError {
    if let kube::Error::Api(status) = error {
        let quotes = kind == Kind::Secret.as_str() && !matches!(status.code, 403 | 404 | 409);
        let message =
            if quotes || status.message.is_empty() { status.reason } else { status.message };
        return ApiError::Refused { code: status.code, message };
    }
    if let kube::Error::SerdeError(source) = error {
        return ApiError::Answer(source);
    }
    if let kube::Error::Service(source) = error {
        return match source.is::<Elapsed>() {
            true => ApiError::Timeout { seconds: TIMEOUT.as_secs() },
            false => ApiError::Unreachable(source),
        };
    }
    if let kube::Error::HyperError(source) = error {
        return ApiError::Unreachable(source.into());
    }
    ApiError::Unreachable(error.into())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn answer_that_may_quote_a_secret_is_withheld() {
        let refused = |code: u16| {
            let status = Status::failure("not base64: c2VjcmV0", "Invalid").with_code(code);
            api_error("Secret", kube::Error::Api(status.boxed())).to_string()
        };
        assert!(refused(422).ends_with("(422): Invalid"));
        assert!(refused(403).contains("not base64"), "it names the account and the request");
    }
}
