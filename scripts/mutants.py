#!/usr/bin/env python3
"""Mutation testing of one crate with all mutants in one build (docs/mutation-testing.md).

The mutants are those that `cargo mutants --list` names. In a copy of the workspace each function gets a
copy of its body for each of its mutants, and BALLAST_MUTANT in the environment chooses one at run time; so
a mutant costs a run of the tests and no build. Mutants that do not compile are dropped.

    scripts/mutants.py policy --test lib --test host [--file REGEX] [--name REGEX] [--out FILE]
"""

import argparse, atexit, concurrent.futures, json, os, re, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOOSE = """
#[doc(hidden)]
pub fn chosen_mutant() -> u32 {
    static CHOSEN: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let read = || std::env::var("BALLAST_MUTANT").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    *CHOSEN.get_or_init(read)
}
"""


def offset(starts, place):
    return starts[place["line"] - 1] + place["column"] - 1


def copy(work):
    """The workspace as it is, without touching what is the same already."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, work / name
        if not source.is_file():
            continue
        bytes = source.read_bytes()
        if not target.exists() or target.read_bytes() != bytes:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(bytes)


def rewrite(path, mutants, plain):
    """The file with its mutants, and for each mutant the lines of its body. `plain`: functions left alone."""
    code = path.read_text()
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = {}
    for m in mutants:
        f = m["function"]
        if not f or "impl " in f["return_type"] or f["function_name"] in plain:
            m["outcome"] = "left out"
            continue
        span = (offset(starts, f["span"]["start"]), offset(starts, f["span"]["end"]))
        spans.setdefault(span, []).append(m)
    for inner in sorted(spans, key=lambda s: s[1] - s[0]):
        outer = [s for s in spans if s != inner and s[0] <= inner[0] and inner[1] <= s[1]]
        if outer:
            spans[outer[0]] += spans.pop(inner)
    out, at, ranges = [], 0, []
    for (start, end), group in sorted(spans.items()):
        name = re.search(r"^[^/\n#]*\bfn\b", code[start:end], re.M)
        head = start + name.start()
        opening = code.index("{", start + name.end())
        body = (opening + 1, end - 1)
        out += [code[at:head], re.sub(r"\bconst fn\b", "fn", code[head:opening])]
        out.append("{ match crate::chosen_mutant() {\n")
        for m in group:
            s, e = offset(starts, m["span"]["start"]), offset(starts, m["span"]["end"])
            first = "".join(out).count("\n") + 1
            text = code[body[0]:s] + " " + m["replacement"] + " " + code[e:body[1]]
            out.append(f"{m['id']} => {{{text}\n}}\n")
            ranges.append((first, first + out[-1].count("\n"), m))
        out.append(f"_ => {{{code[body[0]:body[1]]}\n}}\n}}}}")
        at = end
    out.append(code[at:])
    path.write_text("".join(out))
    return ranges


def build(args, work, mutants, log):
    """Test binaries with all mutants that compile."""
    plain = set(args.plain)
    while True:
        copy(work)
        lib = work / "crates" / args.crate / "src/lib.rs"
        lib.write_text(lib.read_text() + CHOOSE)
        ranges = {}
        for file in sorted({m["file"] for m in mutants}):
            alive = [m for m in mutants if m["file"] == file and m["outcome"] is None]
            ranges[file] = rewrite(work / file, alive, plain)
        command = ["cargo", "test", "-q", f"-j{args.jobs}", "-p", f"ballast-{args.crate}", "--no-run",
                   "--message-format=json"]
        for test in args.test:
            command += ["--lib"] if test == "lib" else ["--test", test]
        env = {**os.environ, "CARGO_TARGET_DIR": str(args.target), "RUSTFLAGS": "--cap-lints=warn"}
        done = subprocess.run(command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=log)
        binaries, unviable, unknown = {}, set(), []
        for line in done.stdout.splitlines():
            message = json.loads(line)
            if message.get("executable"):
                kind = message["target"]["kind"]
                binaries["lib" if "lib" in kind else message["target"]["name"]] = message["executable"]
            error = message.get("message")
            if not error or error.get("level") != "error":
                continue
            hit = False
            for span in error["spans"]:
                for first, last, m in ranges.get(span["file_name"], []):
                    if first <= span["line_start"] <= last:
                        hit = True
                        unviable.add(m["id"])
            if not hit and error["spans"]:
                found = re.search(r"non-const .*`(.*)`", error["message"])
                if found:
                    plain.add(found.group(1))
                unknown.append(error["rendered"])
        for m in mutants:
            if m["id"] in unviable:
                m["outcome"] = "unviable"
        if done.returncode == 0:
            return {test: binaries[test] for test in args.test}
        print(f"{len(unviable)} do not compile", file=sys.stderr)
        if not unviable and not plain - set(args.plain):
            sys.exit("".join(unknown))


def run(binaries, mutant, args, cwd):
    """Whether the tests catch the mutant: at the first that fails the rest is not waited for."""
    env = {**os.environ, "BALLAST_MUTANT": str(mutant), "RUST_BACKTRACE": "0",
           "PROPTEST_MAX_SHRINK_ITERS": "0", "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1"}
    for test, binary in binaries.items():
        skip = [part for name in args.skip for part in ("--skip", name)]
        command = ["timeout", "-s", "KILL", str(args.timeout), binary, "--test-threads=2", *skip]
        with subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL, errors="replace") as tests:
            last = ""
            for line in tests.stdout:
                last = line if line.startswith("test ") else last
                if "... FAILED" in line or line.startswith("failures:"):
                    tests.terminate()
                    return "caught", f"{test}: {line.strip()}"
        if tests.returncode == 137 or tests.returncode == -9:
            return "timed out", test
        if tests.returncode != 0:
            return "caught", f"{test}: exit {tests.returncode}"
    return "survived", ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("crate")
    parser.add_argument("--test", action="append", required=True, help="lib, or a file of tests/")
    parser.add_argument("--file", default="", help="mutants of files that match")
    parser.add_argument("--name", default="", help="mutants whose name matches")
    parser.add_argument("--without", default="^$", help="but not of these")
    parser.add_argument("--plain", action="append", default=[], help="a function that is left alone")
    parser.add_argument("--skip", action="append", default=[], help="tests that are not run")
    parser.add_argument("--timeout", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=1e9, help="mutants after that are not run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, help="a folder for the copy and its build, which stay [default: a new one in target, removed]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    listed = subprocess.run(["cargo", "mutants", "--list", "--json", "-p", f"ballast-{args.crate}"],
                            cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    mutants = [m for m in json.loads(listed)
               if re.search(args.file, m["file"]) and re.search(args.name, m["name"])
               and not re.search(args.without, m["name"])]
    for i, m in enumerate(mutants):
        m["id"], m["outcome"] = i + 1, None
    if args.work is None:
        # Where nobody else can put a .cargo/config.toml above it: what is built there runs as whoever runs this.
        (ROOT / "target").mkdir(exist_ok=True)
        args.work = Path(tempfile.mkdtemp(prefix="mutants-", dir=ROOT / "target"))
        atexit.register(shutil.rmtree, args.work, ignore_errors=True)
    args.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    if args.work.stat().st_uid != os.getuid():
        sys.exit(f"--work {args.work}: it is another user's")
    args.target, args.work = args.work / "target", args.work / "copy"
    args.work.mkdir(exist_ok=True)
    with open(args.target.parent / "log", "w") as log:
        binaries = build(args, args.work, mutants, log)
    cwd = args.work / "crates" / args.crate
    began = time.monotonic()
    outcome, what = run(binaries, 0, args, cwd)
    if outcome != "survived":
        sys.exit(f"the tests fail without a mutant: {what}")
    print(f"{len(mutants)} mutants; without any {time.monotonic() - began:.1f} s", file=sys.stderr)
    end = time.monotonic() + 60 * args.minutes
    alive = [m for m in mutants if m["outcome"] is None]

    def look(m):
        return run(binaries, m["id"], args, cwd) if time.monotonic() < end else ("not run", "")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for m, (outcome, what) in zip(alive, pool.map(look, alive)):
            m["outcome"], m["by"] = outcome, what
            if outcome in ("survived", "timed out"):
                print(f"{outcome}: {m['name']}", flush=True)
    counts = {}
    for m in mutants:
        counts.setdefault(m["file"], {}).setdefault(m["outcome"], []).append(m["name"])
    kinds = ["caught", "survived", "timed out", "unviable", "left out", "not run"]
    print("file, mutants,", ", ".join(kinds))
    for file, found in sorted(counts.items()):
        numbers = [len(found.get(kind, [])) for kind in kinds]
        print(f"{file}, {sum(numbers)}, " + ", ".join(map(str, numbers)))
    if args.out:
        keep = ["name", "file", "outcome", "by"]
        args.out.write_text(json.dumps([{k: m.get(k) for k in keep} for m in mutants], indent=1))


main()
