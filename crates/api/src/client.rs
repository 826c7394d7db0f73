//! A client of the API over the manager's Unix socket: one connection per request.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes as Body;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::{
    AttachSpec, ConfigReloaded, ErrorBody, HostChange, HostView, JournalPage, JournalQuery,
    PoolChange, PoolView, ShutdownRequest, StartView, StopRequest, VmChange, VmSpec, VmView, Why,
};

/// Why a request brought no answer that can be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ClientError {
    #[error("no ballastd at {}: {source} (as a service: systemctl status ballastd; else start it with: ballastd)", .socket.display())]
    Unreachable { socket: PathBuf, source: std::io::Error },
    #[error("{}", .0.message)]
    Refused(ErrorBody),
    #[error("ballastd at {} broke off: {what}", .socket.display())]
    Broken { socket: PathBuf, what: String },
    #[error("ballastd at {} did not answer {path} within {} s", .socket.display(), .after.as_secs())]
    Timeout { socket: PathBuf, path: String, after: Duration },
}

impl ClientError {
    /// Whether nobody listens there. One that may not be used, or that has too much to do, is there.
    pub fn is_no_manager(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        match self {
            ClientError::Unreachable { source, .. } => {
                matches!(source.kind(), ConnectionRefused | NotFound)
            }
            _ => false,
        }
    }
}

/// Cheap to clone; holds no connection.
///
/// # Errors
/// Of every request: no manager answers there (in time, or whole), or it refused; then nothing has changed. Whether it
/// did what it was asked for when its answer did not come, is not known.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    /// For the manager at this socket; nothing is sent yet. It gives up on an answer after 120 s: `run` and `stop` may take as
    /// long as their `wait_s` and `grace_s`, and a minute or two.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { socket: socket.into(), timeout: Duration::from_secs(120) }
    }

    /// Gives up on an answer after so long.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Client {
        Client { timeout, ..self }
    }

    /// The socket it talks to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET /v1/host`.
    pub async fn host(&self) -> Result<HostView, ClientError> {
        self.call(Method::GET, "/v1/host", None::<&()>).await
    }
    /// `PATCH /v1/host`.
    pub async fn change_host(&self, change: &HostChange) -> Result<HostView, ClientError> {
        self.call(Method::PATCH, "/v1/host", Some(change)).await
    }
    /// `GET /v1/vms`.
    pub async fn vms(&self) -> Result<Vec<VmView>, ClientError> {
        self.call(Method::GET, "/v1/vms", None::<&()>).await
    }
    /// `GET /v1/vms/{name}`.
    pub async fn vm(&self, name: &str) -> Result<VmView, ClientError> {
        self.call(Method::GET, &vm_path(name, ""), None::<&()>).await
    }
    /// `POST /v1/vms`.
    pub async fn run(&self, spec: &VmSpec) -> Result<VmView, ClientError> {
        self.call(Method::POST, "/v1/vms", Some(spec)).await
    }
    /// Starts that wait for memory, in the order in which they get it.
    pub async fn starts(&self) -> Result<Vec<StartView>, ClientError> {
        self.call(Method::GET, "/v1/starts", None::<&()>).await
    }
    /// `POST /v1/attachments`.
    pub async fn attach(&self, spec: &AttachSpec) -> Result<VmView, ClientError> {
        self.call(Method::POST, "/v1/attachments", Some(spec)).await
    }
    /// `PATCH /v1/vms/{name}`.
    pub async fn change(&self, name: &str, change: &VmChange) -> Result<VmView, ClientError> {
        self.call(Method::PATCH, &vm_path(name, ""), Some(change)).await
    }
    /// `POST /v1/vms/{name}/stop`.
    pub async fn stop(&self, name: &str, grace: Duration) -> Result<VmView, ClientError> {
        let request = StopRequest { grace_s: grace.as_secs_f64() };
        self.call(Method::POST, &vm_path(name, "/stop"), Some(&request)).await
    }
    /// `GET /v1/vms/{name}/why`.
    pub async fn why(&self, name: &str) -> Result<Why, ClientError> {
        self.call(Method::GET, &vm_path(name, "/why"), None::<&()>).await
    }
    /// `GET /v1/pools`.
    pub async fn pools(&self) -> Result<Vec<PoolView>, ClientError> {
        self.call(Method::GET, "/v1/pools", None::<&()>).await
    }
    /// Defines a pool, or changes it.
    pub async fn change_pool(
        &self,
        name: &str,
        change: &PoolChange,
    ) -> Result<PoolView, ClientError> {
        self.call(Method::PATCH, &pool_path(name), Some(change)).await
    }
    /// The pools that are left.
    pub async fn remove_pool(&self, name: &str) -> Result<Vec<PoolView>, ClientError> {
        self.call(Method::DELETE, &pool_path(name), None::<&()>).await
    }
    /// `POST /v1/config/reload`.
    pub async fn reload(&self) -> Result<ConfigReloaded, ClientError> {
        self.call(Method::POST, "/v1/config/reload", None::<&()>).await
    }
    /// Why it had what it had at that time, milliseconds since 1970.
    pub async fn why_at(&self, name: &str, at_ms: u64) -> Result<Why, ClientError> {
        let path = vm_path(name, &format!("/why?at_ms={at_ms}"));
        self.call(Method::GET, &path, None::<&()>).await
    }
    /// `GET /v1/journal`.
    pub async fn journal(&self, query: &JournalQuery) -> Result<JournalPage, ClientError> {
        let path = format!("/v1/journal{}", query.to_url());
        self.call(Method::GET, &path, None::<&()>).await
    }
    /// `POST /v1/shutdown`.
    pub async fn shutdown(&self, stop_vms: bool) -> Result<HostView, ClientError> {
        let request = ShutdownRequest { stop_vms, ..ShutdownRequest::default() };
        self.call(Method::POST, "/v1/shutdown", Some(&request)).await
    }
    /// Ends the manager and leaves its VMs to the next one, which must come at once; unless it is
    /// `before_ms` since the host's boot by then.
    pub async fn leave(&self, before_ms: u64) -> Result<HostView, ClientError> {
        let before_ms = Some(before_ms);
        let request = ShutdownRequest { stop_vms: false, leave_vms: true, before_ms };
        self.call(Method::POST, "/v1/shutdown", Some(&request)).await
    }

    async fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(self.timeout, self.exchange(method, path, body)).await {
            Ok(result) => result,
            Err(_) => Err(ClientError::Timeout {
                socket: self.socket.clone(),
                path: path.to_owned(),
                after: self.timeout,
            }),
        }
    }

    async fn exchange<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, ClientError> {
        let broken = |what: String| ClientError::Broken { socket: self.socket.clone(), what };
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ClientError::Unreachable { socket: self.socket.clone(), source })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken(e.to_string()))?;
        let driver = tokio::spawn(connection);
        let json = match body {
            Some(b) => serde_json::to_vec(b).map_err(|e| broken(e.to_string()))?,
            None => Vec::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "ballast")
            .header("content-type", "application/json")
            .body(Full::new(Body::from(json)))
            .map_err(|e| broken(e.to_string()))?;
        let response = sender.send_request(request).await.map_err(|e| broken(e.to_string()))?;
        let status = response.status();
        let bytes =
            response.into_body().collect().await.map_err(|e| broken(e.to_string()))?.to_bytes();
        driver.abort();
        if status.is_success() {
            serde_json::from_slice(&bytes).map_err(|e| broken(format!("answer to {path}: {e}")))
        } else {
            Err(match serde_json::from_slice::<ErrorBody>(&bytes) {
                Ok(body) => ClientError::Refused(body),
                Err(_) => broken(format!("{path}: HTTP {status}")),
            })
        }
    }
}

/// Names are `[A-Za-z0-9._-]`; anything else is percent-encoded so that a bad name gets the
/// manager's 404 and cannot change the path.
fn vm_path(name: &str, suffix: &str) -> String {
    format!("/v1/vms/{}{suffix}", encoded(name, b"._-"))
}

fn pool_path(name: &str) -> String {
    format!("/v1/pools/{}", encoded(name, b"._-/"))
}

pub(crate) fn encoded(name: &str, good: &[u8]) -> String {
    let mut text = String::new();
    for b in name.bytes() {
        if b.is_ascii_alphanumeric() || good.contains(&b) {
            text.push(b as char);
        } else {
            text.push_str(&format!("%{b:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_that_may_not_be_used_is_there() {
        let error = |kind: std::io::ErrorKind| ClientError::Unreachable {
            socket: "/run/ballast/api.sock".into(),
            source: kind.into(),
        };
        use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied, WouldBlock};
        assert!(error(NotFound).is_no_manager() && error(ConnectionRefused).is_no_manager());
        assert!(!error(PermissionDenied).is_no_manager() && !error(WouldBlock).is_no_manager());
    }

    #[test]
    fn names_cannot_change_the_path() {
        assert_eq!(vm_path("db-1.a", "/why"), "/v1/vms/db-1.a/why");
        assert_eq!(vm_path("a/../b", ""), "/v1/vms/a%2F..%2Fb");
    }

    #[tokio::test]
    async fn a_missing_manager_is_named() {
        let error = Client::new("/nonexistent/api.sock").host().await.unwrap_err();
        assert!(error.to_string().contains("/nonexistent/api.sock"), "{error}");
    }
}
