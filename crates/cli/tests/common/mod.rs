//! A stand-in for `ballastd`: serves views that change with every look, applies changes to them,
//! and records the requests that change something.
//!
//! Names with a meaning: `full` is refused by admission (507), `taken` is a conflict (409), and a
//! `max` above the VM's size is a bad request (400).

#![allow(dead_code, reason = "each user of this module uses a part of it")]
#![allow(clippy::unwrap_used, reason = "only tests and an example use it")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Path as UrlPath, RawQuery, State};
use axum::http::StatusCode;
use axum::routing::{get, patch, post};
use axum::{Json, Router};
use ballast_api::{
    AttachSpec, ConfigReloaded, ErrorBody, ErrorCode, HostChange, HostView, JournalPage,
    PoolChange, PoolView, StopRequest, VmChange, VmSpec, VmView, Why,
};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

type Answer<T> = Result<Json<T>, (StatusCode, Json<ErrorBody>)>;
type Shared = Arc<Mutex<World>>;

/// One request that was to change something: what, and its body.
pub type Recorded = (String, Value);

pub struct World {
    pub host: HostView,
    pub vms: Vec<VmView>,
    pub pools: Vec<PoolView>,
    pub recorded: Vec<Recorded>,
    looks: u64,
}

impl World {
    fn new() -> World {
        let vms = vec![
            vm("web", "paged", None, "healthy"),
            vm("db", "paged", None, "slow"),
            vm("legacy", "balloon-only", Some("private RAM: start it with share=on"), "healthy"),
            vm("gpu", "unmanaged", Some("vfio-pci device gpu0 pins guest memory"), "missing"),
        ];
        let pools = vec![pool("prod", None), pool("prod/db", Some(512 * MIB))];
        World { host: host(), vms, pools, recorded: Vec::new(), looks: 0 }
    }

    fn vm(&mut self, name: &str) -> Result<&mut VmView, (StatusCode, Json<ErrorBody>)> {
        let found = self.vms.iter_mut().find(|vm| vm.name == name);
        found.ok_or_else(|| refuse(ErrorCode::NotFound, format!("no VM named '{name}'")))
    }

    /// Lets some time pass.
    fn look(&mut self) {
        self.looks += 1;
        let n = self.looks;
        let wave = |phase: u64| (n + phase) % 60 * if (n + phase) % 120 < 60 { 1 } else { 0 };
        self.host.uptime_s += 1.0;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let size = vm.params.size;
            let m = &mut vm.memory;
            m.swapped = (20 + wave(i as u64 * 20)) * MIB;
            m.ballooned = 32 * MIB;
            m.untouched = 16 * MIB;
            m.resident = size - m.swapped - m.ballooned - m.untouched;
            m.consumed = m.resident.min(100 * MIB);
            m.target = (m.consumed + 8 * MIB).min(vm.params.max);
            vm.active.current = m.consumed * (30 + n % 50) / 100;
            vm.active.estimate = vm.active.current;
            vm.active.fast = vm.active.current / 2;
            vm.active.slow = vm.active.current / 3;
            vm.uptime_s += 1.0;
            vm.counters.faults += 120;
            vm.counters.waits += i as u64;
        }
        self.host.consumed = self.vms.iter().map(|vm| vm.memory.consumed).sum();
        let used = self.host.consumed + self.host.overhead;
        self.host.free = self.host.budget.saturating_sub(used);
        let percent = self.host.free * 100 / self.host.budget;
        self.host.state = match percent {
            6.. => ballast_api::StateName::High,
            4..6 => ballast_api::StateName::Soft,
            2..4 => ballast_api::StateName::Hard,
            _ => ballast_api::StateName::Low,
        };
        self.host.counters.faults += 480;
        self.host.counters.swapped_out += 3 * MIB;
        self.host.counters.swapped_in += MIB / 2;
        self.host.counters.ballooned += MIB;
    }
}

/// A running stand-in; ends, and frees its socket, when dropped.
pub struct Fake {
    pub socket: PathBuf,
    world: Shared,
    folder: Option<tempfile::TempDir>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Fake {
    pub fn start() -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let mut fake = Fake::at(&folder.path().join("api.sock"));
        fake.folder = Some(folder);
        fake
    }

    pub fn at(socket: &Path) -> Fake {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let world = Arc::new(Mutex::new(World::new()));
        let app = routes(world.clone());
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(socket).unwrap()
        };
        runtime.spawn(async move { axum::serve(listener, app).await });
        Fake { socket: socket.to_owned(), world, folder: None, runtime: Some(runtime) }
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    pub fn recorded(&self) -> Vec<Recorded> {
        self.world().recorded.clone()
    }

    /// Stops answering, as a manager that was killed: the socket's file stays.
    pub fn vanish(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.vanish();
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn lock(world: &Shared) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refuse(code: ErrorCode, message: String) -> (StatusCode, Json<ErrorBody>) {
    let status = StatusCode::from_u16(code.status()).unwrap();
    (status, Json(ErrorBody { code, message }))
}

fn routes(world: Shared) -> Router {
    Router::new()
        .route("/v1/host", get(get_host).patch(patch_host))
        .route("/v1/vms", get(get_vms).post(post_vm))
        .route("/v1/attachments", post(post_attachment))
        .route("/v1/vms/{name}", get(get_vm).patch(patch_vm))
        .route("/v1/vms/{name}/stop", post(post_stop))
        .route("/v1/vms/{name}/why", get(get_why))
        .route("/v1/pools", get(get_pools))
        .route("/v1/pools/{*name}", patch(patch_pool).delete(delete_pool))
        .route("/v1/config/reload", post(post_reload))
        .route("/v1/journal", get(get_journal))
        .with_state(world)
}

fn record<T: serde::Serialize>(world: &mut World, what: String, body: &T) {
    world.recorded.push((what, serde_json::to_value(body).unwrap()));
}

async fn get_host(State(world): State<Shared>) -> Json<HostView> {
    let mut world = lock(&world);
    world.look();
    world.host.vms = u32::try_from(world.vms.len()).unwrap();
    Json(world.host.clone())
}

async fn patch_host(State(world): State<Shared>, Json(c): Json<HostChange>) -> Answer<HostView> {
    let mut world = lock(&world);
    record(&mut world, "PATCH host".to_owned(), &c);
    if let Some(budget) = c.budget {
        if budget < 128 * MIB {
            return Err(refuse(
                ErrorCode::NoRoom,
                format!("budget {budget} is below what is promised to running VMs"),
            ));
        }
        world.host.budget = budget;
    }
    world.host.tax = c.tax.unwrap_or(world.host.tax);
    Ok(Json(world.host.clone()))
}

async fn get_vms(State(world): State<Shared>) -> Json<Vec<VmView>> {
    Json(lock(&world).vms.clone())
}

async fn get_vm(State(world): State<Shared>, UrlPath(name): UrlPath<String>) -> Answer<VmView> {
    lock(&world).vm(&name).map(|vm| Json(vm.clone()))
}

async fn post_vm(State(world): State<Shared>, Json(spec): Json<VmSpec>) -> Answer<VmView> {
    let mut world = lock(&world);
    record(&mut world, "POST vms".to_owned(), &spec);
    match spec.name.as_str() {
        "full" => Err(refuse(
            ErrorCode::NoRoom,
            "no room for full: needs 512 MiB of machine memory, 104 MiB are unreserved".to_owned(),
        )),
        "taken" => Err(refuse(ErrorCode::Conflict, "a VM named taken runs already".to_owned())),
        name => {
            let mut new = vm(name, "paged", None, "missing");
            new.params.size = spec.max;
            new.params.max = spec.max;
            new.params.min = spec.min;
            world.vms.push(new.clone());
            Ok(Json(new))
        }
    }
}

async fn post_attachment(State(world): State<Shared>, Json(s): Json<AttachSpec>) -> Answer<VmView> {
    let mut world = lock(&world);
    record(&mut world, "POST attachments".to_owned(), &s);
    let new = vm(&s.name, "unmanaged", Some("a second process maps its RAM: virtiofsd"), "missing");
    world.vms.push(new.clone());
    Ok(Json(new))
}

async fn patch_vm(
    State(world): State<Shared>,
    UrlPath(name): UrlPath<String>,
    Json(c): Json<VmChange>,
) -> Answer<VmView> {
    let mut world = lock(&world);
    record(&mut world, format!("PATCH {name}"), &c);
    let p = &mut world.vm(&name)?.params;
    if c.max.is_some_and(|max| max > p.size) {
        return Err(refuse(
            ErrorCode::BadRequest,
            format!("max of {name} is above its size of {} bytes", p.size),
        ));
    }
    if c.shares == Some(666) {
        return Err(refuse(ErrorCode::Internal, format!("shares of {name} cannot be 666")));
    }
    p.shares = c.shares.unwrap_or(p.shares);
    p.min = c.min.unwrap_or(p.min);
    p.max = c.max.unwrap_or(p.max);
    p.tax = c.tax.unwrap_or(p.tax);
    let vm = world.vm(&name)?;
    if c.salt.is_some() || c.no_salt {
        vm.sharing.domain = if c.no_salt { "own" } else { "salt:1a2b3c4d" }.to_owned();
    }
    world.vm(&name).map(|vm| Json(vm.clone()))
}

async fn post_stop(
    State(world): State<Shared>,
    UrlPath(name): UrlPath<String>,
    Json(request): Json<StopRequest>,
) -> Answer<VmView> {
    let mut world = lock(&world);
    record(&mut world, format!("STOP {name}"), &request);
    let last = world.vm(&name)?.clone();
    world.vms.retain(|vm| vm.name != name);
    Ok(Json(last))
}

async fn get_journal(State(world): State<Shared>, RawQuery(query): RawQuery) -> Json<JournalPage> {
    record(&mut lock(&world), format!("GET journal {}", query.unwrap_or_default()), &());
    let turn = json!({
        "n": 41, "at_ms": 1_772_366_400_000u64, "took_us": 9, "trigger": "web arrived",
        "state": "high", "free": 104 * MIB, "goal": 29 * MIB, "vms": 1,
        "changes": ["web arrives: target 90 MiB"], "outcomes": [], "repeats": 0
    });
    Json(JournalPage { turns: vec![from(turn)], more: false, notes: vec![] })
}

async fn get_why(
    State(world): State<Shared>,
    UrlPath(name): UrlPath<String>,
    RawQuery(query): RawQuery,
) -> Answer<Why> {
    let mut world = lock(&world);
    let at_ms = query.as_deref().and_then(|q| q.strip_prefix("at_ms=")?.parse().ok());
    if let Some(query) = query {
        record(&mut world, format!("GET why {name} {query}"), &());
    }
    let target = world.vm(&name)?.memory.target;
    Ok(Json(Why {
        vm: name.clone(),
        age_s: 3.0,
        trigger: "free memory fell to soft".to_owned(),
        verdict: format!("{name} is to have {} MiB, 12 MiB less than before", target / MIB),
        steps: (1..=30)
            .map(|i| {
                format!(
                    "step {i}: {name} has rho 12.50 shares per page (2560 shares, idle fraction \
                     0.25, tax 0.75), the smallest of all VMs that are above their min"
                )
            })
            .collect(),
        at_ms,
        outcomes: at_ms
            .map(|_| format!("{name} was down to 90 MiB 3.0 s after it was asked first."))
            .into_iter()
            .collect(),
        notes: Vec::new(),
    }))
}

async fn get_pools(State(world): State<Shared>) -> Json<Vec<PoolView>> {
    Json(lock(&world).pools.clone())
}

async fn patch_pool(
    State(world): State<Shared>,
    UrlPath(name): UrlPath<String>,
    Json(c): Json<PoolChange>,
) -> Answer<PoolView> {
    let mut world = lock(&world);
    record(&mut world, format!("PATCH pool {name}"), &c);
    let mut new = pool(&name, c.max);
    new.shares = c.shares.unwrap_or(new.shares);
    world.pools.push(new.clone());
    Ok(Json(new))
}

async fn delete_pool(
    State(world): State<Shared>,
    UrlPath(name): UrlPath<String>,
) -> Answer<Vec<PoolView>> {
    let mut world = lock(&world);
    if name == "prod" {
        let why = "pool prod cannot go: pool prod/db is in it".to_owned();
        return Err(refuse(ErrorCode::Conflict, why));
    }
    world.pools.retain(|pool| pool.name != name);
    Ok(Json(world.pools.clone()))
}

async fn post_reload(State(_): State<Shared>) -> Json<ConfigReloaded> {
    let changes = vec!["tax 0.75 -> 0.5".to_owned(), "VM web: shares 10 -> 20".to_owned()];
    Json(ConfigReloaded { file: "/etc/ballast.toml".to_owned(), changes })
}

fn pool(name: &str, max: Option<u64>) -> PoolView {
    from(json!({
        "name": name, "shares": 163840, "min": 256 * MIB, "max": max, "expandable": true,
        "tax": null, "configured": false, "vms": ["web"], "pools": [], "reserved": 70 * MIB,
        "unreserved": max.map(|max| max - 70 * MIB), "target": 200 * MIB, "consumed": 100 * MIB
    }))
}

fn host() -> HostView {
    let budget = 448 * MIB;
    let threshold = |state: &str, lower: u64, upper: u64| json!({"state": state, "lower": budget * lower / 100, "upper": budget * upper / 100});
    from(json!({
        "version": "0.1.0", "pid": 100, "uptime_s": 192.0, "budget": budget, "free": 104 * MIB,
        "consumed": 256 * MIB, "overhead": 24 * MIB, "peak_used": 380 * MIB,
        "measured_used": 270 * MIB, "measured_peak": 377 * MIB, "state": "high",
        "thresholds": [threshold("high", 4, 6), threshold("soft", 2, 4),
                       threshold("hard", 1, 2), threshold("low", 0, 0)],
        "overcommit": 2.0, "overcommit_peak": 2.1, "tax": 0.75, "vms": 4,
        "refused": [
            {"pid": 815, "name": "stray", "size": 96 * MIB, "resident": 80 * MIB,
             "why": "a VM named 'stray' runs already", "for_s": 192.0},
            {"pid": 816, "name": null, "size": null, "resident": 12 * MIB,
             "why": "version 9 of the protocol", "for_s": 3.0}],
        "swap_reserved": 512 * MIB, "swap_used": 40 * MIB,
        "swap_locations": [
            {"path": "/ssd/ballast", "priority": 10, "state": "failed", "reserved": 384 * MIB,
             "used": 40 * MIB, "free": 0, "write_errors": 77, "read_errors": 3},
            {"path": "/disk/ballast", "priority": -2, "state": "good", "reserved": 128 * MIB,
             "used": 0, "free": 4096 * MIB, "write_errors": 0, "read_errors": 0}],
        "run_dir": {"path": "/run/ballast", "size": 1000 * MIB, "free": 99 * MIB,
            "note": "less than a tenth is free"},
        "nodes": [
            {"id": 0, "size": 16384 * MIB, "free": 200 * MIB, "state": "soft", "missing": 24 * MIB, "bound": 3},
            {"id": 1, "size": 16384 * MIB, "free": 9216 * MIB, "state": "high", "missing": 0, "bound": 0}],
        "accel": "tcg (no stock kernel boots on this /dev/kvm)",
        "manager_cpu_s": 1.5, "manager_rss": 20 * MIB,
        "sharing": {"enabled": true, "shared": 96 * MIB, "common": 16 * MIB, "saved": 80 * MIB,
                    "zero_dropped": 40 * MIB, "broken": 2 * MIB, "breaks": 777,
                    "breaks_per_s": 12.0, "scanned": 65536, "scan_rate": 2560.0, "cpu_s": 4.5,
                    "cpu_percent": 1.25, "metadata": MIB, "mappings": 3456},
        "counters": {"ballooned": 0, "swapped_out": 0, "swapped_in": 0,
                     "zero_dropped": 0, "faults": 0, "waits": 0, "blocks": 0}
    }))
}

fn vm(name: &str, mode: &str, reason: Option<&str>, health: &str) -> VmView {
    from(json!({
        "name": name, "state": "running", "management": {"mode": mode, "reason": reason},
        "pid": 4711, "accel": "tcg", "uptime_s": 100.0, "vmm_uptime_s": 7500.0,
        "params": {"size": 256 * MIB, "min": 64 * MIB, "max": 256 * MIB, "shares": 2560,
                   "tax": 0.75},
        "memory": {"consumed": 128 * MIB, "target": 160 * MIB, "untouched": 16 * MIB,
                   "resident": 144 * MIB, "large": 40 * MIB, "shared": 0, "broken": 0, "compressed": 0, "staged": 0,
                   "swapped": 64 * MIB, "ballooned": 32 * MIB, "overhead": 6 * MIB,
                   "vmm_overhead": 50 * MIB, "swap_reserved": 192 * MIB, "swap_target": 0},
        "active": {"estimate": 96 * MIB, "slow": 90 * MIB, "fast": 96 * MIB, "current": 80 * MIB,
                   "periods": 12},
        "balloon": {"health": health, "target": 64 * MIB, "reported": 60 * MIB,
                    "limit": 150 * MIB},
        "guest": {"total": 240 * MIB, "free": 30 * MIB, "available": 80 * MIB,
                  "disk_caches": 50 * MIB, "swap_in": 0, "swap_out": 0, "major_faults": 321,
                  "age_s": 2},
        "sharing": sharing(mode),
        "counters": {"faults": 10, "swapped_in": 0, "swapped_out": 0, "zero_dropped": 8 * MIB,
                     "ballooned": 0, "sampled": 0, "waits": 0, "blocks": 0, "wait_s": 0.0,
                     "cpu_s": 2.5},
        "folder": format!("/run/ballast/vms/{name}")
    }))
}

fn sharing(mode: &str) -> Value {
    if mode != "paged" {
        return json!({"domain": ""});
    }
    json!({"domain": "own", "shared": 48 * MIB, "saved": 40 * MIB, "broken": MIB, "breaks": 321,
           "breaks_per_s": 6.0, "scanned": 32768, "scan_rate": 1280.0, "cpu_s": 2.5,
           "cpu_percent": 0.5, "mappings": 1234, "note": "mappings: only runs are shared"})
}

fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}
