#!/usr/bin/env bash
# Starts the local Kubernetes cluster, or finds it running. Its kubeconfig: $OUTBOX_STATE/kubeconfig.
# usage: up.sh [--hold PID DESCRIPTION]
#   --hold: the cluster is in use by process PID until that ends; other runs are refused meanwhile.
# With KUBECONFIG set to a cluster of the user's own it starts nothing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for part in lib process owner network pki node control_plane teardown load parts/python parts/cluster; do
  # shellcheck source=/dev/null
  source "$here/$part.sh"
done

# A busy machine answers late: with every process there, the cluster gets a minute before it is taken for broken.
healthy() {
  local name deadline=$((SECONDS + 60))
  for name in "${COMPONENTS[@]}"; do recorded "$name" >/dev/null || return 1; done
  until kubectl get --raw /readyz >/dev/null 2>&1 && node_ready && dns_ready; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 1
  done
}

node_ready() {
  [ "$(kubectl get node "$NODE_NAME" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null)" = True ]
}

dns_ready() {
  [ "$(kubectl -n kube-system get deployment coredns -o 'jsonpath={.status.readyReplicas}' 2>/dev/null)" = 1 ]
}

bring_up() {
  refuse_if_owned
  if healthy; then
    say "the cluster is already up"
  else
    if anything_left; then
      say "taking away what an earlier run left"
      teardown
    fi
    start_cluster
  fi
  if [ -n "$hold_pid" ]; then claim "$hold_pid" "$hold_text"; fi
}

start_cluster() {
  refuse_foreign
  mkdir -p "$OUTBOX_STATE"
  make_pki
  install -m 600 "$PKI/admin.kubeconfig" "$KUBECONFIG_FILE"
  network_up
  etcd_up
  apiserver_up
  containerd_up
  if forget_containers; then
    # It holds in memory what it just forgot on disk.
    stop_process containerd
    containerd_up
  fi
  load_binary pause "$KUBERNETES/pause"
  load_binary coredns "$KUBERNETES/coredns"
  say "container runtime ready"
  wait_for 60 "the API server" kubectl get --raw /readyz
  say "API server ready"
  controllers_up
  kubelet_up
  wait_for 30 "the API server" kubectl apply -f "$here/manifests"
  wait_for 60 "the node" node_ready
  say "node ready"
  wait_for 60 "the name server" dns_ready
  say "names ready"
}

hold_pid='' hold_text=''
if [ $# -gt 0 ]; then
  if [ "$1" != --hold ] || [ $# != 3 ]; then fail "usage: up.sh [--hold PID DESCRIPTION]"; fi
  hold_pid=$2 hold_text=$3
fi
if [ -n "${KUBECONFIG:-}" ] && [ "$KUBECONFIG" != "$KUBECONFIG_FILE" ]; then
  say "KUBECONFIG is $KUBECONFIG: that cluster is used and none is started"
  exit 0
fi
need_root "it starts a container runtime and a kubelet"
setup_cluster
with_lock "$OUTBOX_STATE/lock" bring_up
say "up: export KUBECONFIG=$KUBECONFIG_FILE"
