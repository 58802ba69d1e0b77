#!/usr/bin/env bash
# The test command: sets up what it needs, then lint, shell lint, and every test. Arguments go to pytest.
#
#   bash tests/run.sh              everything, under 20 min on 2 cores
#   bash tests/run.sh -k store     what matches
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${SETUP-} == off ]]; then
    : "${PYTHON:?SETUP=off needs PYTHON}"
else
    python3 -m eagle3.setup --tests
    PYTHON=.venv/bin/python
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
git ls-files '*.sh' .ci/run | xargs -r "$(dirname "$PYTHON")/shellcheck" -S warning
# Stage commands inside tests start interpreters of their own; two cores need no more threads than that.
export TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest -q --durations=15 "$@"
