#!/usr/bin/env bash
# Every test, on real servers and a real cluster; sets up what they need. Arguments go to pytest.
# OUTBOX_KEEP_CLUSTER=1 leaves the cluster up afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/cluster/setup.sh
tests/cluster/up.sh --hold $$ "make test"
tests/cluster/images.sh
status=0
.venv/bin/python -m pytest "${@:-tests}" || status=$?
[ -n "${OUTBOX_KEEP_CLUSTER:-}" ] || tests/cluster/down.sh
exit "$status"
