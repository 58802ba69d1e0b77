#!/usr/bin/env bash
# 02: the verifier as a vLLM server, in the foreground; ends in exec, so this pid is the server's.
#
#   ./02_launch_verifier.sh extract             hidden-state extraction, generation included (for 03)
#   ./02_launch_verifier.sh serve               plain
#   ./02_launch_verifier.sh serve --draft DIR   with a flat draft beside it
#
# Reads the recipe (RECIPE, RECIPE_SET) and the profile (PROFILE; any variable of it set here wins).
# DRY_RUN=1 prints the command and starts nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ ${1-} == extract || ${1-} == serve ]] || { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ ${1-} == --help || ${1-} == -h ]] && exit 0; exit 2; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-$root/.venv/bin/python}
command -v "$PYTHON" >/dev/null || { echo "02_launch_verifier.sh: no $PYTHON; run ./run_pipeline.sh setup, or set PYTHON" >&2; exit 1; }

# Profile variables into the environment: vLLM and NCCL read some of them themselves.
settings=$("$PYTHON" -m eagle3.config env)
set -a; eval "$settings"; set +a
args=$(mktemp); trap 'rm -f "$args"' EXIT
"$PYTHON" -m eagle3.server args "$@" >"$args"
mapfile -d '' -t flags <"$args"; rm -f "$args"

command=("$PYTHON" -m vllm.entrypoints.openai.api_server "${flags[@]}")
printf '+ '; printf '%q ' "${command[@]}"; echo
[[ ${DRY_RUN-} == 1 ]] && exit 0
if (exec 3<>"/dev/tcp/127.0.0.1/$VERIFIER_PORT") 2>/dev/null; then
    echo "02_launch_verifier.sh: port $VERIFIER_PORT is in use: stop what listens there, or set VERIFIER_PORT" >&2
    exit 1
fi
exec "${command[@]}"
