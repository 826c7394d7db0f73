# Sourced by ./run, ./test, ./bench, ./experiment: installs what is missing.
# shellcheck shell=bash

step() { printf '==> %s\n' "$*"; }
detail() { printf '    %s\n' "$*"; }
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# A service has none, by default.
export HOME="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}"

# The rust-version of the workspace.
rust_wanted() { sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml; }

# version_at_least HAVE WANTED
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

rust_is_good() {
    command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
    local have
    have=$(rustc --version 2>/dev/null | awk '{ print $2 }') || return 1
    [ -n "$have" ] && version_at_least "${have%%-*}" "$(rust_wanted)"
}

# Version of the package that apt would install; empty if there is none.
candidate() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: \([0-9].*\)/\1/p'; }

APT_UPDATED=
apt_update() {
    [ -z "$APT_UPDATED" ] || return 0
    step "Updating the package lists"
    local said tries=0
    # apt's own timeout is for dpkg's locks alone, and not for that of the lists.
    until said=$(LC_ALL=C apt-get -q -o DPkg::Lock::Timeout=300 update 2>&1 >/dev/null); do
        if [[ $said == *"Could not get lock"* ]] && [ $((tries += 1)) -le 60 ]; then
            sleep 5
            continue
        fi
        printf '%s\n' "$said" >&2
        fail "apt-get update failed"
    done
    APT_UPDATED=yes
}

# Waits for whoever else installs something: a machine that was just booted updates itself.
apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >/dev/null
}

# apt_try PACKAGES...: installs them unless others would have to go for it.
apt_try() {
    step "Installing $*"
    apt_get --no-remove "$@"
}

apt_install() {
    apt_try "$@" || fail "apt-get install $* failed, or would remove other packages"
}

ensure_packages() {
    # program:package
    local pair busybox missing=()
    for pair in qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils busybox:busybox-static \
        cpio:cpio mke2fs:e2fsprogs dbench:dbench xz:xz-utils zstd:zstd gzip:gzip cc:build-essential; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null ||
            missing+=("${pair#*:}")
    done
    # What guests get of it has no libraries beside it; the package `busybox` links to them.
    ! busybox=$(command -v busybox) || ! head -c 4096 "$busybox" | grep -q /ld-linux ||
        missing+=(busybox-static)
    # The static C library that the guests' program is linked with.
    [ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing+=(libc6-dev)
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || fail "missing: ${missing[*]} (no apt-get to install them with)"
    [ "$(id -u)" = 0 ] || fail "missing: ${missing[*]} (run as root, or: apt-get install ${missing[*]})"
    apt_update
    # Each of the two programs of that name conflicts with the other, and does for it.
    case " ${missing[*]} " in
    *" busybox-static "*)
        step "Installing busybox-static (in the place of busybox, where that is installed)"
        apt_get busybox-static || fail "apt-get install busybox-static failed"
        ;;
    esac
    apt_install "${missing[@]}"
}

# The smallest images have none, and cargo fetches nothing without.
ensure_certificates() {
    [ ! -e /etc/ssl/certs/ca-certificates.crt ] || return 0
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 0
    apt_update
    apt_install ca-certificates
}

ensure_rust() {
    ensure_certificates
    # A toolchain of rustup is not in PATH of every shell.
    [ ! -d "$HOME/.cargo/bin" ] || PATH="$HOME/.cargo/bin:$PATH"
    rust_is_good && return 0
    local wanted package
    wanted=$(rust_wanted)
    if ! command -v rustup >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt_update
        # Debian keeps a recent toolchain for its browsers; Ubuntu packages rustup.
        for package in "rustc cargo" "rustc-web cargo-web"; do
            # shellcheck disable=SC2086 # two words
            set -- $package
            if version_at_least "$(candidate "$1")" "$wanted" && [ -n "$(candidate "$2")" ]; then
                apt_try "$1" "$2" || continue
                hash -r
                rust_is_good && return 0
            fi
        done
        [ -z "$(candidate rustup)" ] || apt_try rustup || true
    fi
    if command -v rustup >/dev/null; then
        step "Installing the stable Rust toolchain with rustup"
        rustup -q toolchain install stable --profile minimal -c clippy -c rustfmt || fail "rustup cannot install it"
        # Whose default is another keeps it.
        rustup -q default >/dev/null 2>&1 || rustup -q default stable
        export RUSTUP_TOOLCHAIN=stable
        PATH="$HOME/.cargo/bin:$PATH"
        hash -r
        rust_is_good && return 0
    fi
    fail "Rust $wanted or newer is needed, and nothing has it that goes with what is installed here (install rustup, then: rustup default stable; Debian: or let apt replace that with rustc-web and cargo-web)"
}

# What ./test checks lints and format with, where it is not there: of the same source as the compiler.
ensure_lints() {
    cargo clippy --version >/dev/null 2>&1 && cargo fmt --version >/dev/null 2>&1 && return 0
    if command -v rustup >/dev/null; then
        rustup -q component add clippy rustfmt
    elif [ "$(id -u)" = 0 ] && [ "$(dpkg-query -W -f '${Status}' rustc-web 2>/dev/null)" = "install ok installed" ]; then
        apt_update
        apt_try rust-web-clippy rustfmt-web
    elif [ "$(id -u)" = 0 ] && [ -n "$(candidate rust-clippy)" ]; then
        apt_update
        apt_try rust-clippy rustfmt
    fi || detail "no lints: they do not go with what is installed here"
}

# Checks licences and sources of what Ballast depends on; takes minutes to build, once.
ensure_cargo_deny() {
    cargo deny --version >/dev/null 2>&1 && return 0
    step "Installing cargo-deny"
    cargo install --quiet --locked cargo-deny || fail "cargo install cargo-deny failed"
}

# The kernel that guests boot is fetched with apt-get download, which needs package lists.
ensure_lists() {
    command -v apt-cache >/dev/null || fail "apt is needed to fetch a kernel for the guests"
    local cache=${BALLAST_CACHE:-$HOME/.cache/ballast}
    compgen -G "$cache/kernel-*/vmlinuz" >/dev/null && return 0
    [ -z "$(apt-cache pkgnames linux-image- 2>/dev/null)" ] || return 0
    [ "$(id -u)" = 0 ] || fail "no package lists (run as root, or: apt-get update)"
    apt_update
}

ensure_prerequisites() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "Ballast runs on x86-64 Linux only"
    ensure_packages
    ensure_rust
    ensure_lists
}

# Builds the programs of the demo, the experiments and the benchmarks, as ./test does.
build_programs() {
    step "Building Ballast (release)"
    cargo build --release --locked -p ballast-manager -p ballast-cli -p ballast-shim -p ballast-lab
}

# absolute_out FROM ARGUMENTS...: into `args`, with what follows --out as it was meant in the folder FROM.
absolute_out() {
    local from=$1 arg before=
    shift
    args=()
    for arg in "$@"; do
        case "$before:$arg" in
        --out:/* | *:--out=/*) ;;
        --out:*) arg=$from/$arg ;;
        *:--out=*) arg=--out=$from/${arg#--out=} ;;
        esac
        before=$arg
        args+=("$arg")
    done
}

# Runs a program of the build: lab SUBCOMMAND ARGUMENTS...
lab() { exec "${CARGO_TARGET_DIR:-target}/release/ballast-lab" "$@"; }
