#!/usr/bin/env bash
# The whole main job, as `make demo` runs it. Arguments go to the demo (--help lists them).
#   KUBECONFIG       a cluster of your own: it is used and none is started
#   OUTBOX_REGISTRY  with that: the registry prefix that its nodes take images from
#   OUTBOX_TAG       their tag (dev)
#   OUTBOX_DEMO_PATIENCE  multiplies every deadline, for a slow machine; the verdict says so
set -euo pipefail
cd "$(dirname "$0")/../../.."
export OUTBOX_CACHE=${OUTBOX_CACHE:-${HOME:?}/.cache/outbox-operator}
export OUTBOX_STATE=${OUTBOX_STATE:-/var/lib/outbox-operator}
# One clock for all that follows: every line counts from here.
export OUTBOX_BEGAN=${EPOCHREALTIME/,/.}
# shellcheck source=tests/tools/cluster/lib.sh
source tests/tools/cluster/lib.sh
if cold; then
  say "set-up: nothing is cached yet, so Kubernetes, servers and images are built first: about 16 min with two processors"
  say "set-up: then the demo, about 5 min; the next run has all of it in $OUTBOX_CACHE and starts at once"
else
  say "set-up: most is cached in $OUTBOX_CACHE; what is missing says how long it takes. Then the demo, about 5 min"
fi
tests/tools/cluster/setup.sh python cluster built
tests/tools/cluster/up.sh --hold $$ "make demo"
tests/tools/cluster/images.sh postgres rabbitmq operator worker spark
export PATH=$OUTBOX_CACHE/bin:$PATH
# exec: the process that holds the cluster is the demo itself, as long as it runs.
exec .venv/bin/python -m tests.tools.demo "$@"
