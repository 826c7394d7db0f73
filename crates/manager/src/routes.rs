//! The HTTP+JSON API: paths to methods of the manager, failures to statuses.

use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post};
use axum::{Json, Router};
use ballast_api::{
    AttachSpec, ConfigReloaded, ErrorBody, ErrorCode, HostChange, HostView, JournalPage,
    JournalQuery, PoolChange, PoolView, ShutdownRequest, StartView, StopRequest, VmChange, VmSpec,
    VmView, Why,
};
use serde::de::DeserializeOwned;
use utoipa::OpenApi;

use crate::manager::{Ending, Failure, Manager};
use crate::{journal, metrics, upgrade, views};

type Shared = State<Arc<Manager>>;

/// How long a manager that is to leave waits for VMs that are being started.
const STARTS: Duration = Duration::from_secs(15);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.body())).into_response()
    }
}

/// JSON whose mistakes are answered as every other failure is.
struct Body<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;
    async fn from_request(req: axum::extract::Request, state: &S) -> Result<Self, Failure> {
        let bytes =
            Bytes::from_request(req, state).await.map_err(|e| Failure::bad(e.body_text()))?;
        // An array would be taken for the fields in their order, and an empty one for no wishes.
        if bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(Failure::bad("the body of the request is not a JSON object"));
        }
        match Json::from_bytes(&bytes) {
            Ok(Json(value)) => Ok(Body(value)),
            Err(e) => Err(Failure::bad(e.body_text())),
        }
    }
}

/// What the path names, likewise.
struct Name(String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        name.map(|Path(name)| Name(name)).map_err(|e| Failure::bad(e.body_text()))
    }
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Ballast", description = "The API of ballastd, over its Unix socket."),
    paths(
        get_host,
        patch_host,
        list_vms,
        run_vm,
        list_starts,
        attach,
        get_vm,
        patch_vm,
        stop_vm,
        why,
        list_pools,
        patch_pool,
        delete_pool,
        reload,
        get_journal,
        shutdown,
        openapi,
        metrics::serve
    )
)]
struct ApiDoc;

/// The whole API.
pub fn router(manager: Arc<Manager>) -> Router {
    Router::new()
        .route("/v1/host", get(get_host).patch(patch_host))
        .route("/v1/vms", get(list_vms).post(run_vm))
        .route("/v1/starts", get(list_starts))
        .route("/v1/attachments", post(attach))
        .route("/v1/vms/{name}", get(get_vm).patch(patch_vm))
        .route("/v1/vms/{name}/stop", post(stop_vm))
        .route("/v1/vms/{name}/why", get(why))
        .route("/v1/pools", get(list_pools))
        .route("/v1/pools/{*name}", patch(patch_pool).delete(delete_pool))
        .route("/v1/config/reload", post(reload))
        .route("/v1/journal", get(get_journal))
        .route("/v1/shutdown", post(shutdown))
        .route("/v1/openapi.json", get(openapi))
        .route("/metrics", get(metrics::serve))
        .method_not_allowed_fallback(async || {
            Failure::new(ErrorCode::NotFound, "no such method on this path of the API")
        })
        .fallback(async || Failure::new(ErrorCode::NotFound, "no such path in this API"))
        .with_state(manager)
}

/// What writes files: a disk may take long, and what else is answered is not to wait for it.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<Json<T>, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Failure::internal(e.to_string()))?.map(Json)
}

/// This description.
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200)))]
async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(ApiDoc::openapi())
}

#[utoipa::path(get, path = "/v1/host", responses((status = 200, body = HostView)))]
async fn get_host(State(manager): Shared) -> Json<HostView> {
    Json(views::host(&manager))
}

#[utoipa::path(patch, path = "/v1/host", request_body = HostChange,
    responses((status = 200, body = HostView), (status = 400, body = ErrorBody),
        (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn patch_host(
    State(manager): Shared,
    Body(change): Body<HostChange>,
) -> Result<Json<HostView>, Failure> {
    apart(move || {
        manager.change_host(&change)?;
        Ok(views::host(&manager))
    })
    .await
}

#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<VmView>)))]
async fn list_vms(State(manager): Shared) -> Json<Vec<VmView>> {
    Json(views::vms(&manager))
}

#[utoipa::path(post, path = "/v1/vms", request_body = VmSpec,
    responses((status = 200, body = VmView), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn run_vm(State(manager): Shared, Body(spec): Body<VmSpec>) -> Result<Json<VmView>, Failure> {
    // A start goes on when the client that asked for it goes away.
    let start = tokio::spawn(async move { manager.run_vm(spec).await });
    start.await.map_err(|e| Failure::internal(e.to_string()))?.map(Json)
}

/// Starts that wait for memory to be made free, in the order in which they get it.
#[utoipa::path(get, path = "/v1/starts", responses((status = 200, body = Vec<StartView>)))]
async fn list_starts(State(manager): Shared) -> Json<Vec<StartView>> {
    Json(manager.waiting_starts())
}

#[utoipa::path(post, path = "/v1/attachments", request_body = AttachSpec,
    responses((status = 200, body = VmView), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn attach(
    State(manager): Shared,
    Body(spec): Body<AttachSpec>,
) -> Result<Json<VmView>, Failure> {
    let start = tokio::spawn(async move { manager.attach(spec).await });
    start.await.map_err(|e| Failure::internal(e.to_string()))?.map(Json)
}

#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path)),
    responses((status = 200, body = VmView), (status = 404, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn get_vm(State(manager): Shared, Name(name): Name) -> Result<Json<VmView>, Failure> {
    manager.view_of(&name).map(Json)
}

#[utoipa::path(patch, path = "/v1/vms/{name}", params(("name" = String, Path)),
    request_body = VmChange,
    responses((status = 200, body = VmView), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn patch_vm(
    State(manager): Shared,
    Name(name): Name,
    Body(change): Body<VmChange>,
) -> Result<Json<VmView>, Failure> {
    apart(move || {
        let vm = manager.change_vm(&name, &change)?;
        Ok(views::vm(&manager, &vm))
    })
    .await
}

#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path)),
    request_body = StopRequest,
    responses((status = 200, body = VmView), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn stop_vm(
    State(manager): Shared,
    Name(name): Name,
    Body(request): Body<StopRequest>,
) -> Result<Json<VmView>, Failure> {
    if !(0.0..=86_400.0).contains(&request.grace_s) {
        return Err(Failure::bad("grace_s: not between 0 and 86400"));
    }
    let grace = Duration::from_secs_f64(request.grace_s);
    let stop = tokio::spawn(async move { manager.stop_vm(&name, grace).await });
    stop.await.map_err(|e| Failure::internal(e.to_string()))?.map(Json)
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    at_ms: Option<u64>,
}

type Asked<T> = Result<Query<T>, QueryRejection>;

fn asked<T>(query: Asked<T>) -> Result<T, Failure> {
    query.map(|Query(query)| query).map_err(|e| Failure::bad(e.body_text()))
}

#[utoipa::path(get, path = "/v1/vms/{name}/why",
    params(("name" = String, Path), ("at_ms" = Option<u64>, Query)),
    responses((status = 200, body = Why), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn why(
    State(manager): Shared,
    Name(name): Name,
    query: Asked<When>,
) -> Result<Json<Why>, Failure> {
    if let Some(at_ms) = asked(query)?.at_ms {
        return journal::why_at(manager, name, at_ms).await.map(Json);
    }
    let vm = manager.vm(&name)?;
    views::why(&manager, &vm).map(Json)
}

#[utoipa::path(get, path = "/v1/pools", responses((status = 200, body = Vec<PoolView>)))]
async fn list_pools(State(manager): Shared) -> Json<Vec<PoolView>> {
    Json(views::pools(&manager))
}

/// Defines a pool, or changes it. Slashes in the path belong to the name.
#[utoipa::path(patch, path = "/v1/pools/{name}", params(("name" = String, Path)),
    request_body = PoolChange,
    responses((status = 200, body = PoolView), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn patch_pool(
    State(manager): Shared,
    Name(name): Name,
    Body(change): Body<PoolChange>,
) -> Result<Json<PoolView>, Failure> {
    apart(move || {
        manager.change_pool(&name, &change)?;
        let view = views::pools(&manager).into_iter().find(|pool| pool.name == name);
        view.ok_or_else(|| Failure::internal(format!("pool {name} is gone again")))
    })
    .await
}

/// Takes a pool away that a command defined, or gives it back what the configuration says of it.
#[utoipa::path(delete, path = "/v1/pools/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Vec<PoolView>), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn delete_pool(
    State(manager): Shared,
    Name(name): Name,
) -> Result<Json<Vec<PoolView>>, Failure> {
    apart(move || {
        manager.remove_pool(&name)?;
        Ok(views::pools(&manager))
    })
    .await
}

/// Reads the configuration again; all of it counts from now on, or, when anything is wrong, nothing.
#[utoipa::path(post, path = "/v1/config/reload",
    responses((status = 200, body = ConfigReloaded), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn reload(State(manager): Shared) -> Result<Json<ConfigReloaded>, Failure> {
    apart(move || manager.reload()).await
}

#[utoipa::path(get, path = "/v1/journal",
    params(("since_ms" = Option<u64>, Query), ("until_ms" = Option<u64>, Query),
        ("vm" = Option<String>, Query), ("limit" = Option<u32>, Query),
        ("all" = Option<bool>, Query)),
    responses((status = 200, body = JournalPage), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn get_journal(
    State(manager): Shared,
    query: Asked<JournalQuery>,
) -> Result<Json<JournalPage>, Failure> {
    journal::list(manager, asked(query)?).await.map(Json)
}

#[utoipa::path(post, path = "/v1/shutdown", request_body = ShutdownRequest,
    responses((status = 200, body = HostView), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody)))]
async fn shutdown(
    State(manager): Shared,
    Body(request): Body<ShutdownRequest>,
) -> Result<Json<HostView>, Failure> {
    if request.stop_vms && request.leave_vms {
        return Err(Failure::bad("stop_vms: give either stop_vms or leave_vms"));
    }
    if request.before_ms.is_some() && !request.leave_vms {
        return Err(Failure::bad("before_ms: goes with leave_vms alone"));
    }
    if request.leave_vms {
        // To its end, also when the client goes away; but for nobody who would have come after.
        let asks = Arc::new(());
        let asker = Arc::downgrade(&asks);
        let leave = tokio::spawn(async move { leave(&manager, request.before_ms, &asker).await });
        return leave.await.map_err(|e| Failure::internal(e.to_string()))?.map(Json);
    }
    if !request.stop_vms && manager.has_paged_vms() {
        return Err(Failure::new(
            ErrorCode::Conflict,
            "paged VMs run: they would pause until a manager comes back (stop_vms stops them)",
        ));
    }
    // VMs that somebody else started and that are not paged do without a manager. To its end, too: one that has stopped
    // its VMs starts none any more.
    let end = tokio::spawn(async move {
        let ending = if request.stop_vms { manager.stop_all().await } else { manager.leaving() };
        let last = views::host(&manager);
        manager.ending.send_replace(ending);
        match ending {
            Ending::VmsLeft => Err(Failure::internal("VMs do not end, and are left as they are")),
            _ => Ok(last),
        }
    });
    end.await.map_err(|e| Failure::internal(e.to_string()))?.map(Json)
}

/// Leaves all VMs to the next manager, unless that must not be. One who asks with a time comes after; `asker` is there as long
/// as its connection is.
async fn leave(
    manager: &Manager,
    before_ms: Option<u64>,
    asker: &Weak<()>,
) -> Result<HostView, Failure> {
    // One at a time: what the first gives up would let VMs start while the second waits for none.
    let _one = manager.leaving.lock().await;
    // A start that is cut short would be found half done.
    if let Err(names) = manager.settle_starts(STARTS).await {
        let (names, s) = (names.join(", "), STARTS.as_secs());
        let why = format!("VMs are being started, and were not ready in {s} s: {names}");
        return Err(Failure::new(ErrorCode::Conflict, why));
    }
    let is_gone = |end| upgrade::since_boot_ms() >= end || asker.strong_count() == 0;
    if before_ms.is_some_and(is_gone) {
        manager.reopen();
        let why = "who asked does not wait for it any more: the VMs stay here";
        return Err(Failure::new(ErrorCode::Conflict, why));
    }
    let last = views::host(manager);
    manager.ending.send_replace(Ending::LeaveVms);
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn vms_are_left_to_nobody_who_has_gone() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let later = Some(upgrade::since_boot_ms() + 3_600_000);
        let refused = leave(&manager, later, &Weak::new()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
        assert!(!manager.is_closing());
        let asks = Arc::new(());
        let late = leave(&manager, Some(0), &Arc::downgrade(&asks)).await.unwrap_err();
        assert_eq!(late.code, ErrorCode::Conflict);
        leave(&manager, later, &Arc::downgrade(&asks)).await.unwrap();
        assert!(manager.is_closing());
    }
}
