#!/usr/bin/env bash
# Every test, on real servers and a real cluster; sets up what they need. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/cluster/setup.sh
tests/cluster/up.sh
tests/cluster/images.sh
status=0
.venv/bin/python -m pytest "${@:-tests}" || status=$?
# A cluster that this run found running stays; up.sh recorded which it was.
[ -n "${OUTBOX_KEEP_CLUSTER:-}" ] || tests/cluster/down.sh
exit "$status"
