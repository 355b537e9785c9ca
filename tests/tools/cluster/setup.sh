#!/usr/bin/env bash
# Installs and builds what tests need, into a cache outside the checkout. Safe to run again and at once with others.
# usage: setup.sh [PART...]      without a part: all of them
#   python    uv and the checkout's .venv, from requirements.lock
#   postgres  PostgreSQL servers 14, 15 and 18 in $OUTBOX_CACHE/postgres/MAJOR/bin, and pgbouncer
#   rabbitmq  the RabbitMQ server, not started
#   kafka     the jars of a Kafka broker, not started, and a Java
#   monitoring  Prometheus and promtool, not started
#   spark     a Java, for Spark sessions outside the cluster, and Spark with its classes ready to be mapped
#   cluster   the local Kubernetes cluster's programs, kubectl and Helm (in $OUTBOX_CACHE/bin)
#   argocd    Argo CD without its user interface, Redis, and kstatus (in $OUTBOX_CACHE/bin/argocd)
#   model     TLC, which checks the protocol's model (docs/model)
#   chaos     what make chaos needs beside them: toxiproxy, and a shim that steps a worker's clock
#   images    what images.sh builds with, and the Debian base images
#   built     the images of the demo and the tests, not yet loaded into a cluster (images.sh loads them)
# and, only when it is named:
#   keda      KEDA, for tests/keda
#   bench     the peers of make bench: Debezium Server, graphile-worker, PGQueuer and others
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/tools/cluster/lib.sh
source "$here/lib.sh"
ALL=(python postgres rabbitmq kafka monitoring spark model cluster argocd images built chaos)
for part in python postgres rabbitmq kafka monitoring spark model cluster argocd images chaos keda bench; do
  # shellcheck source=/dev/null
  source "$here/parts/$part.sh"
done

[ $# -gt 0 ] || set -- "${ALL[@]}"
for part in "$@"; do
  declare -F "setup_$part" >/dev/null || fail "no part '$part': one of ${ALL[*]} keda bench"
done
mkdir -p "$OUTBOX_CACHE"

# beside PART...: in a session of its own, which ends with this script.
running=()
beside() {
  [ $# != 0 ] || return 0
  OUTBOX_BEGAN=$STARTED_AT setsid "$here/setup.sh" "$@" &
  running+=($!)
}

end_running() {
  local pid
  for pid in "${running[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
}

# Side by side: what is compiled keeps the processors busy, and the rest waits for the network much of the time.
compiled=() images=() others=()
for part in "$@"; do
  case $part in
    cluster | argocd | chaos | keda) compiled+=("$part") ;;
    images | built) images+=("$part") ;;
    *) others+=("$part") ;;
  esac
done
case $# in
  "${#compiled[@]}" | "${#images[@]}" | "${#others[@]}") # of one kind
    for part in "$@"; do "setup_$part"; done
    [ ${#compiled[@]} = 0 ] || drop_go_sources
    ;;
  *)
    trap end_running EXIT
    beside "${compiled[@]}"
    beside "${images[@]}"
    beside "${others[@]}"
    for _ in "${running[@]}"; do wait -n; done
    trap - EXIT
    ;;
esac
say "setup done: $*"
