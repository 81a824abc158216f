//! Answers: JSON, problems as RFC 9457 has them, event streams as lines; and JSON bodies with our errors.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use proto::error::{Code, Coded, ErrorBody};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

/// An error as an answer.
pub(crate) struct Problem(pub(crate) ErrorBody);

impl Problem {
    /// A problem of the request itself.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self(ErrorBody { code: Code::Usage, message: message.into(), causes: Vec::new(), hint: None })
    }
    /// Something that is not there.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self(ErrorBody { code: Code::NotFound, message: message.into(), causes: Vec::new(), hint: None })
    }
}

impl<E: Coded> From<E> for Problem {
    fn from(error: E) -> Self {
        Self(error.body())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::error!(code = ?self.0.code, causes = ?self.0.causes, "{}", self.0.message);
        }
        json(status, "application/problem+json", &self.0)
    }
}

/// A record as an answer.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        json(StatusCode::OK, "application/json", &self.0)
    }
}

/// The answer of a handler.
pub(crate) type Reply<T> = Result<Json<T>, Problem>;

fn json(status: StatusCode, kind: &str, record: &impl Serialize) -> Response {
    match serde_json::to_vec(record) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, kind)], bytes).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Events as lines, until the sender is gone. When the client is gone, the receiver is, and the sender learns of it.
pub(crate) fn events<T: Serialize + Send + 'static>(receiver: mpsc::Receiver<T>) -> Response {
    let lines = ReceiverStream::new(receiver).map(|event| {
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        Ok::<_, Infallible>(Bytes::from(line))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// A JSON body.
pub(crate) struct Input<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Input<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|error| Problem::usage(format!("the body can't be read: {}", error.body_text())))?;
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|error| Problem::usage(format!("the body makes no sense: {error}")))
    }
}
