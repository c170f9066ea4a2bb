#!/usr/bin/env bash
# Make the development environment: ./.venv (or $VENV) with SGLang, the test tools, this package and tests/cpusim.
#
# With an NVIDIA GPU it holds SGLang complete; without one the part that a CPU can use (tests/cpusim/uv-overrides.txt).
# Running it again is quick: nothing is done while the files that decide the outcome are unchanged. FORCE=1 redoes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
OVERRIDES=tests/cpusim/uv-overrides.txt
SGLANG="sglang==0.5.15.post1"
TOOLS=(pytest pytest-xdist pytest-timeout hypothesis ruff matplotlib rich tqdm numpy safetensors scipy openai aiohttp packaging)
# Needed by SGLang on a CPU although it does not declare them.
CPU_EXTRAS=(dill loguru jsonschema)

# Where Python may not write bytecode, each of an engine's three processes would compile 5,800 modules for 20 s.
export UV_COMPILE_BYTECODE=1

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# Sets UV. Where there is none, one is installed into a throw-away environment and then, for the next time, into $VENV.
find_uv() {
    local candidate
    for candidate in uv "$VENV/bin/uv" "$HOME/.local/bin/uv"; do
        if "$candidate" --version >/dev/null 2>&1; then UV=$candidate; return; fi
    done
    say "installing uv"
    BOOTSTRAP=$(mktemp -d)
    trap 'rm -rf "$BOOTSTRAP"' EXIT
    if python3 -m venv "$BOOTSTRAP" >/dev/null 2>&1; then
        "$BOOTSTRAP/bin/python" -m pip install --quiet uv
    else  # a python3 without ensurepip
        python3 -m pip install --quiet --target "$BOOTSTRAP" uv || die "cannot install uv: python3 has neither venv nor pip"
    fi
    UV=$BOOTSTRAP/bin/uv
    TOOLS+=(uv)
}

# uv does not read pip's configuration; a machine that names its package index there means it for us too.
adopt_pip_index() {
    local index
    [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || return 0
    index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
}

# A Python that SGLang supports: python3 if it fits, else another one, else one that uv fetches.
choose_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo 3.12
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then KIND=gpu; else KIND=cpu; fi
STAMP=$VENV/.setup-stamp
FINGERPRINT=$(cat <(echo "$KIND $PWD") pyproject.toml tests/cpusim/pyproject.toml "$OVERRIDES" scripts/setup_env.sh | sha256sum)

if [ "${FORCE:-0}" != 1 ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$FINGERPRINT" ]; then
    say "$VENV is up to date"
    exit 0
fi

adopt_pip_index
find_uv
if ! [ -x "$VENV/bin/python" ]; then
    say "creating $VENV"
    "$UV" venv --quiet --python "$(choose_python)" "$VENV"
fi
pip_install() { "$UV" pip install --python "$VENV/bin/python" "$@"; }

if [ $KIND = gpu ]; then
    say "NVIDIA GPU found: installing all of $SGLANG (about 11 GB on disk)"
    pip_install "$SGLANG" "${TOOLS[@]}"
else
    say "no GPU: installing the part of $SGLANG that runs on a CPU (about 5 GB on disk)"
    pip_install --override "$OVERRIDES" "$SGLANG" "${TOOLS[@]}" "${CPU_EXTRAS[@]}"
fi
say "installing this package and tests/cpusim, editable"
pip_install --quiet --no-deps --editable . --editable tests/cpusim

echo "$FINGERPRINT" > "$STAMP"
say "done: $("$VENV/bin/python" --version) in $VENV"
