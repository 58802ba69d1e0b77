#!/usr/bin/env bash
# Chats in, a trained, converted, served and measured EAGLE-3 draft out.
#
#   ./run_pipeline.sh [run]      set up if need be, then stages 01 to 06; run it again to continue
#   ./run_pipeline.sh setup      only make .venv (or check PYTHON with SETUP=off)
#   ./run_pipeline.sh plan       tokens, bytes, hours and price, before anything is spent   [--json] [--from RUN_DIR]
#   ./run_pipeline.sh status     where a run stands, at any time                            [--json]
#   ./run_pipeline.sh report     write REPORT.md into the run directory
#
# Variables (all optional):
#   RECIPE=smollm2-135m  the experiment: a name in configs/recipes or a YAML file
#   PROFILE=gpu-x1       the machine: a name in configs/profiles (default: by what nvidia-smi finds)
#   SAMPLES=10           training rows (default: the recipe's); grow a run with RUN_DIR=... SAMPLES=1000
#   RUN_DIR=DIR          default runs/$RECIPE-$SAMPLES
#   RECIPE_SET="a.b=1"   recipe overrides, blank-separated
#   FROM=03 TO=05        only these stages      FORCE=04,05  make these stages anew
#   ROUNDS=3             extract, train and delete the data in that many windows (smaller disk)
#   DRY_RUN=1            print every command, run nothing
#   SETUP=off PYTHON=... use an interpreter that is already equipped (a container)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
FROM=${FROM:-01} TO=${TO:-06} DRY_RUN=${DRY_RUN:-0} ROUNDS=${ROUNDS:-1}
child='' began=$SECONDS

die() { echo "run_pipeline.sh: $1" >&2; exit "${2:-1}"; }

# A stage runs as a background child, so that a signal sent to this script alone reaches it at once.
run() {
    "$@" & child=$!
    local code=0
    wait "$child" || code=$?
    child=''
    return "$code"
}
forward() {
    trap '' HUP INT TERM
    # Always TERM: bash starts background children with INT ignored, and not every program undoes that.
    [[ -z $child ]] || { kill -TERM "$child" 2>/dev/null || true; wait "$child" || true; }
    exit "$1"
}
trap 'forward 129' HUP; trap 'forward 130' INT; trap 'forward 143' TERM

setup() {
    if [[ ${SETUP-} == off ]]; then
        [[ -n ${PYTHON-} ]] || die "SETUP=off needs PYTHON=/path/to/an/equipped/python" 2
        (cd "$root" && run "$PYTHON" -m eagle3.setup --check-only "$PYTHON") >&2
    else
        command -v python3 >/dev/null || die "no python3 on PATH; Python 3.11 or 3.12 is needed"
        (cd "$root" && run python3 -m eagle3.setup "$@") >&2
        PYTHON=$root/.venv/bin/python
    fi
    export PYTHON
}

settings() {
    local found
    found=$("$PYTHON" -m eagle3.config env) || exit $?
    set -a; eval "$found"; set +a
    RUN_DIR=$("$PYTHON" -m eagle3.config run-dir) || exit $?
    export RUN_DIR
}

selected() { [[ ! $1 < $FROM && ! $1 > $TO ]]; }

# stage NN COMMAND...: print it, run it, tell how long it took.
stage() {
    local n=$1 code=0 start=$SECONDS; shift
    selected "$n" || return 0
    printf '[%s] + ' "$n"; printf '%q ' "$@"; echo
    [[ $DRY_RUN != 1 ]] || return 0
    run "$@" || code=$?
    if (( code == 2 )); then
        echo "[$n] refused these settings: status 2" >&2; exit 2
    elif (( code != 0 )); then
        echo "[$n] failed with status $code after $(( SECONDS - start )) s; continue with the same command (only what is missing is redone)" >&2; exit "$code"
    fi
    echo "[$n] $(( SECONDS - start )) s"
}
# In rounds only the first one drops what was made before.
force() { [[ ,${FORCE-}, != *,"$1",* ]] || (( ${k:-1} > 1 )) || echo --force; }

# 03 needs the verifier as a server: it is started only if rows are missing, and stopped in any case.
extract() {
    local code=0
    selected 03 || return 0
    if [[ $DRY_RUN == 1 ]]; then
        echo "[02] + ./02_launch_verifier.sh extract    (which runs the next line)"
        DRY_RUN=1 "$root/02_launch_verifier.sh" extract
    elif [[ -z $(force 03) ]]; then
        "$PYTHON" "$root/03_extract_hidden.py" --check "$@" >/dev/null || code=$?
        (( code != 0 )) || { stage 03 "$PYTHON" "$root/03_extract_hidden.py" "$@"; return; }
        (( code == 1 )) || exit "$code"
    fi
    # shellcheck disable=SC2046  # one word or none
    stage 03 "$PYTHON" -m eagle3.server run extract -- "$PYTHON" "$root/03_extract_hidden.py" "$@" $(force 03)
}

train() {
    local launch=("$PYTHON")
    if (( ${TRAIN_GPUS:-0} > 1 )); then
        launch=("$PYTHON" -m accelerate.commands.launch --multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no --num_processes "$TRAIN_GPUS")
    fi
    # shellcheck disable=SC2046
    stage 04 "${launch[@]}" "$root/04_train.py" "$@" $(force 04)
}

# Whether 04 is done with a round: its states may be deleted by now and are not extracted again.
trained() {
    local said code=0
    [[ $DRY_RUN != 1 && -z $(force 03)$(force 04) ]] || return 1
    said=$("$PYTHON" "$root/04_train.py" --check --round "$1" 2>&1) || code=$?
    (( code != 2 )) || { echo "$said" >&2; exit 2; }
    return "$code"
}

pipeline() {
    # shellcheck disable=SC2046
    stage 01 "$PYTHON" "$root/01_prepare.py" $(force 01)
    if (( ROUNDS > 1 )); then
        local k
        for (( k = 1; k <= ROUNDS; k++ )); do
            ! trained "$k/$ROUNDS" || continue
            extract --round "$k/$ROUNDS"
            train --round "$k/$ROUNDS"
        done
        k=1
    else
        extract
        train
    fi
    # shellcheck disable=SC2046
    stage 05 "$PYTHON" "$root/05_convert.py" $(force 05)
    # shellcheck disable=SC2046
    stage 06 "$PYTHON" "$root/06_evaluate.py" $(force 06)
}

command=${1:-run}; shift || true
case $command in
    -h|--help|help) sed -n '2,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    setup) setup "$@"; exit 0 ;;
    plan|status|report)
        setup; settings
        exec "$PYTHON" -m "eagle3.$command" "$@" ;;
    run) (( $# == 0 )) || die "run takes no arguments (got $*); settings are variables, see --help" 2 ;;
    *) die "unknown command $command; one of run, setup, plan, status, report" 2 ;;
esac
[[ $FROM =~ ^0[1-6]$ && $TO =~ ^0[1-6]$ && ! $FROM > $TO ]] || die "FROM=$FROM TO=$TO: two stages 01..06, in order" 2
[[ $ROUNDS =~ ^[1-9][0-9]*$ ]] || die "ROUNDS=$ROUNDS: a whole number from 1" 2
[[ $ROUNDS == 1 || $TO != 03 ]] || die "ROUNDS=$ROUNDS TO=03: a window is deleted for the next one, so 04 has to follow (TO=04)" 2

setup; settings
echo "recipe ${RECIPE:-smollm2-135m}, profile $PROFILE, run directory $RUN_DIR"
if [[ $DRY_RUN == 1 ]]; then pipeline; exit 0; fi
mkdir -p "$RUN_DIR"
exec 9>"$RUN_DIR/.lock"
flock -n 9 || die "another run_pipeline.sh works in $RUN_DIR; ./run_pipeline.sh status tells more"
# Whatever happens, the run directory ends with a report that says where it stands and how to go on.
trap 'code=$?; "$PYTHON" -m eagle3.report --quiet 9>&- || true; exit $code' EXIT
run "$PYTHON" -m eagle3.server stop 9>&-
run "$PYTHON" -m eagle3.preflight 9>&-
pipeline 9>&-
echo "all stages done in $(( SECONDS - began )) s"
"$PYTHON" -m eagle3.report --summary 9>&-
