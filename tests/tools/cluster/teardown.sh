# shellcheck shell=bash
# Takes down whatever of ours runs, in any state: up.sh calls it over the leftovers of a killed run, down.sh to end.

COMPONENTS=(kubelet proxy provisioner scheduler controller-manager apiserver etcd containerd)

teardown() {
  # Nothing but containerd has data that will be read again.
  local name pid
  for name in "${COMPONENTS[@]}"; do
    if [ "$name" != containerd ] && pid=$(recorded "$name"); then kill -KILL "$pid" 2>/dev/null || true; fi
  done
  stop_process "${COMPONENTS[@]:0:7}"
  kill_pods
  if recorded containerd >/dev/null; then
    forget_containers || true
    stop_process containerd
  fi
  rm -f "$PIDS/containerd"
  kill_shims
  unmount_below "$OUTBOX_STATE"
  unmount_below "$OUTBOX_RUN"
  remove_cgroups
  [ ! -f "$OUTBOX_RUN/sysctls" ] || network_down
  # Links that the kubelet leaves in a shared folder.
  find /var/log/containers -maxdepth 1 -type l -lname "$OUTBOX_STATE/*" -delete 2>/dev/null || true
  rm -rf "$OUTBOX_RUN" "$OUTBOX_STATE"/{etcd,kubelet,pod-logs,volumes,volume-plugins,cni,demo} "$OUTBOX_STATE/owner"
}

# Whether anything of a cluster of ours is there, running or left over.
anything_left() { [ -d "$OUTBOX_RUN" ] || [ -d "$OUTBOX_STATE/etcd" ]; }
