//! What other programs read: metrics, and the description of the API.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::collections::BTreeMap;

use support::http::raw;
use support::{Ballastd, image_or_skip};

/// A line parser of OpenMetrics text: types by family, values by series.
fn parse(text: &str) -> (BTreeMap<String, String>, BTreeMap<String, f64>) {
    let (mut types, mut values) = (BTreeMap::new(), BTreeMap::new());
    assert!(text.ends_with("# EOF\n"), "{text}");
    for line in text.strip_suffix("# EOF\n").unwrap().lines() {
        if let Some(about) = line.strip_prefix("# ") {
            let words: Vec<&str> = about.splitn(3, ' ').collect();
            let [keyword, family, rest] = words[..] else { panic!("{line}") };
            assert!(["HELP", "TYPE", "UNIT"].contains(&keyword), "{line}");
            match keyword {
                "TYPE" => assert_eq!(types.insert(family.to_owned(), rest.to_owned()), None),
                "UNIT" => assert!(family.ends_with(&format!("_{rest}")), "{line}"),
                _ => assert!(!rest.is_empty()),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        // A histogram's series have these endings, a counter's the last.
        let family = ["_bucket", "_count", "_sum", "_total"]
            .iter()
            .find_map(|e| name.strip_suffix(e).filter(|family| types.contains_key(*family)));
        let family = family.unwrap_or(name);
        let kind = types.get(family).unwrap_or_else(|| panic!("{line}: before its type"));
        assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
        assert_eq!(kind == "histogram", family != name && kind != "counter", "{line}");
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{line}");
        assert_eq!(values.insert(series.to_owned(), value.parse().unwrap()), None, "{line}");
    }
    (types, values)
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_openmetrics_and_say_what_the_api_says() {
    let ballastd = Ballastd::start(&["--budget", "192M"]);
    let socket = ballastd.client.socket();
    let (status, head, body) = raw(socket, "GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    let (types, values) = parse(&body);
    assert_eq!(values["ballast_budget_bytes"], f64::from(192 << 20));
    assert_eq!(types["ballast_swapped_in_bytes"], "counter");
    let Some(image) = image_or_skip() else { return };
    let mut spec = ballastd.guest(image, "a.b-c", 96, "");
    (spec.shares, spec.min) = (Some(7), 8 << 20);
    ballastd.client.run(&spec).await.unwrap();
    let (_, values) = parse(&raw(socket, "GET", "/metrics", "").2);
    assert_eq!(values["ballast_vm_shares{vm=\"a.b-c\"}"], 7.0);
    assert_eq!(values["ballast_vm_min_bytes{vm=\"a.b-c\"}"], f64::from(8 << 20));
    assert!(values["ballast_vm_consumed_bytes{vm=\"a.b-c\"}"] > 0.0);
    assert!(values["ballast_faults_total"] > 0.0);
    // Counters do not go back when a VM leaves.
    let faults = values["ballast_faults_total"];
    ballastd.client.stop("a.b-c", std::time::Duration::ZERO).await.unwrap();
    let (_, values) = parse(&raw(socket, "GET", "/metrics", "").2);
    assert!(values["ballast_faults_total"] >= faults);
    assert!(!values.keys().any(|series| series.contains("a.b-c")));
}

#[test]
fn the_description_lists_every_route() {
    let ballastd = Ballastd::start(&["--budget", "64M"]);
    let (status, _, body) = raw(ballastd.client.socket(), "GET", "/v1/openapi.json", "");
    assert_eq!(status, 200);
    let description: serde_json::Value = serde_json::from_str(&body).unwrap();
    let mut described: Vec<String> = Vec::new();
    for (path, operations) in description["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            described.push(format!("{} {path}", method.to_uppercase()));
        }
    }
    described.sort();
    let routes = [
        "DELETE /v1/pools/{name}",
        "GET /metrics",
        "GET /v1/host",
        "GET /v1/journal",
        "GET /v1/openapi.json",
        "GET /v1/pools",
        "GET /v1/starts",
        "GET /v1/vms",
        "GET /v1/vms/{name}",
        "GET /v1/vms/{name}/why",
        "PATCH /v1/host",
        "PATCH /v1/pools/{name}",
        "PATCH /v1/vms/{name}",
        "POST /v1/attachments",
        "POST /v1/config/reload",
        "POST /v1/shutdown",
        "POST /v1/vms",
        "POST /v1/vms/{name}/stop",
    ];
    assert_eq!(described, routes);
    // And what the program answers to is described.
    let program = include_str!("../src/routes.rs");
    let answered = program.lines().filter_map(|line| line.trim().strip_prefix(".route(\""));
    let mut paths: Vec<String> =
        answered.map(|line| line.split_once('"').unwrap().0.replace("{*", "{")).collect();
    paths.sort();
    let mut known: Vec<&str> =
        routes.iter().map(|route| route.split_once(' ').unwrap().1).collect();
    known.sort_unstable();
    known.dedup();
    assert_eq!(paths, known);
    // Each is there: not the answer for paths that are not.
    for route in routes {
        let (method, path) = route.split_once(' ').unwrap();
        let (status, _, body) =
            raw(ballastd.client.socket(), method, &path.replace("{name}", "none"), "[]");
        assert!(!body.contains("no such path") && !body.contains("no such method"), "{route}");
        // 409: this manager has no configuration to read again.
        let answers =
            if route == "POST /v1/config/reload" { vec![409] } else { vec![200, 400, 404] };
        assert!(answers.contains(&status), "{route}: {status} {body}");
    }
    // Whatever is described has a schema for what it takes and gives.
    for name in ["VmSpec", "VmView", "HostView", "VmChange", "AttachSpec", "ErrorBody"] {
        assert!(description["components"]["schemas"][name].is_object(), "{name}");
    }
}
