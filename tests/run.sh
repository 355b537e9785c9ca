#!/usr/bin/env bash
# Every test, on real servers and a cluster of their own; sets up what they need. Arguments go to pytest.
# --nightly: also what only `make test-all` runs.
# OUTBOX_KEEP_CLUSTER=1 uses the cluster that is up, and leaves it up.
set -euo pipefail
cd "$(dirname "$0")/.."
export OUTBOX_BEGAN=${OUTBOX_BEGAN:-${EPOCHREALTIME/,/.}}
tests/tools/cluster/setup.sh
# A demo leaves its operator behind, which would serve the tests' resources too.
if [ -z "${OUTBOX_KEEP_CLUSTER:-}" ]; then
  echo "tests: a cluster that a demo left up is taken down first (OUTBOX_KEEP_CLUSTER=1 would use it)"
  tests/tools/cluster/down.sh
fi
# It comes up while the first tests run. Tests that need it wait for its `status` (tests/support/kubernetes/cluster.py).
OUTBOX_CLUSTER_COMING=$(mktemp -d)
export OUTBOX_CLUSTER_COMING
bring_up() {
  local status=0
  { tests/tools/cluster/up.sh --hold $$ "make test" && tests/tools/cluster/images.sh; } \
    >"$OUTBOX_CLUSTER_COMING/log" 2>&1 || status=$?
  echo "$status" >"$OUTBOX_CLUSTER_COMING/status.new"
  mv "$OUTBOX_CLUSTER_COMING/status.new" "$OUTBOX_CLUSTER_COMING/status"
  return "$status"
}
echo "tests: the cluster comes up while the first tests run; $OUTBOX_CLUSTER_COMING/log tells how"
bring_up &
coming=$!
# Directories of PostgreSQL servers that a killed run left in memory (tests/support/servers/postgres.py).
[ ! -d /dev/shm ] || find /dev/shm -maxdepth 1 -name 'outbox-*' -mmin +180 -exec rm -rf {} +
status=0
# tests/conftest.py says what begins first; unit tests run shuffled in `make check`.
layers=(tests/unit tests/property tests/model tests/contract tests/migration tests/integration tests/chart tests/chaos tests/acceptance)
[ "${*:---nightly}" != --nightly ] || set -- "$@" "${layers[@]}"
tests/passes.sh "$@" || status=$?
wait "$coming" || { status=1 && cat "$OUTBOX_CLUSTER_COMING/log" >&2; }
rm -r "$OUTBOX_CLUSTER_COMING"
[ -n "${OUTBOX_KEEP_CLUSTER:-}" ] || tests/tools/cluster/down.sh
exit "$status"
