#!/usr/bin/env bash
# Start SGLang with one of configs/*.yaml: scripts/launch.sh [--stock] CONFIG [more server arguments]
#
# CONFIG is a path, or the name of a file in configs/. Further arguments win over the file. --stock serves the same
# configuration without the ring. PYTHON chooses the interpreter; otherwise .venv's, or python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

stock=0
if [ "${1:-}" = --stock ]; then stock=1; shift; fi
case "${1:-}" in ''|-*) usage ;; esac
config=$1
shift
[ -f "$config" ] || config=$root/configs/$config
[ -f "$config" ] || config=$config.yaml
if ! [ -f "$config" ]; then
    echo "no configuration $config; there are:" >&2
    (cd "$root/configs" && ls -- *.yaml) >&2
    exit 2
fi

# A switch of the file cannot be taken back by a later argument: leave its lines out, and keep what then runs visible.
if [ $stock = 1 ]; then
    mkdir -p "$root/results"
    stock_config=$root/results/stock-$(basename "$config")
    sed -E '/^(enable-)?gdn-replayssm/d' "$config" > "$stock_config"
    config=$stock_config
fi

python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
exec "$python" -m sglang.launch_server --config "$config" "$@"
