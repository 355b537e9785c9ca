# shellcheck shell=bash
# The node: container runtime, kubelet, and taking every trace of its pods away. Needs network.sh and process.sh.

SOCKET=$OUTBOX_RUN/containerd.sock
# One group for each state folder: /outbox-operator for the usual one.
CGROUP=/$(tr / - <<<"${OUTBOX_STATE#/var/lib/}")

ctr() { command ctr -a "$SOCKET" -n k8s.io "$@"; }

containerd_config() {
  cat <<TOML
version = 2
root = "$OUTBOX_STATE/containerd"
state = "$OUTBOX_RUN/containerd"
[grpc]
  address = "$SOCKET"
[plugins."io.containerd.internal.v1.opt"]
  path = "$OUTBOX_STATE/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:dev"
  disable_apparmor = true
  # Some machines may not lower the score; without this every pod there dies at its start.
  restrict_oom_score_adj = true
  # Keeps pods' network namespaces where only ours are.
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "$OUTBOX_RUN/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$CNI_PLUGINS"
    conf_dir = "$OUTBOX_STATE/cni"
TOML
}

kubelet_config() {
  cat <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: $CGROUP
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://$SOCKET
clusterDNS: [$DNS_IP]
clusterDomain: cluster.local
resolvConf: ""
tlsCertFile: $PKI/kubelet.crt
tlsPrivateKeyFile: $PKI/kubelet.key
podLogsDir: $OUTBOX_STATE/pod-logs
volumePluginDir: $OUTBOX_STATE/volume-plugins
# There is no registry to fetch an image from again, and a full disk is the developer's to clean.
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
imageMaximumGCAge: 0s
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
# Tests wait for what these loops notice.
syncFrequency: 10s
fileCheckFrequency: 60s
nodeStatusUpdateFrequency: 10s
configMapAndSecretChangeDetectionStrategy: Watch
maxPods: 250
shutdownGracePeriod: 0s
YAML
}

containerd_up() {
  containerd_config >"$OUTBOX_STATE/containerd.toml"
  start_process containerd containerd -c "$OUTBOX_STATE/containerd.toml"
  wait_for 30 containerd ctr version
}

kubelet_up() {
  make_cgroups
  kubelet_config >"$OUTBOX_STATE/kubelet.yaml"
  start_process kubelet "$KUBERNETES/kubelet" --config "$OUTBOX_STATE/kubelet.yaml" \
    --kubeconfig "$PKI/kubelet.kubeconfig" --hostname-override "$NODE_NAME" --node-ip "$NODE_IP" \
    --root-dir "$OUTBOX_STATE/kubelet"
}

# The control-group hierarchies of this machine: one with version 2, one for each controller with version 1.
hierarchies() {
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    echo /sys/fs/cgroup
  else
    awk '$3 ~ "^cgroup2?$" && $2 ~ "^/sys/fs/cgroup/" {print $2}' /proc/mounts
  fi
}

# Every pod lives under one group of ours, so that its processes can be found whatever became of its shim.
make_cgroups() {
  local hierarchy group file
  while read -r hierarchy; do
    group=$hierarchy$CGROUP
    mkdir -p "$group"
    for file in cpuset.cpus cpuset.mems; do
      # Version 1 wants these two filled before a process may join.
      if [ -f "$group/$file" ] && [ -z "$(cat "$group/$file")" ]; then
        cat "$hierarchy/$file" >"$group/$file" 2>/dev/null || true
      fi
    done
    # With the kernel's default all pods together have as much processor time as one process beside them, and tests run
    # many: twice as much (eight times starved the API server). Version 1 counts from 1024, version 2 from 100.
    if [ -f "$group/cpu.shares" ]; then echo 2048 >"$group/cpu.shares"; fi
    if [ -f "$group/cpu.weight" ]; then echo 200 >"$group/cpu.weight"; fi
    if [ -f "$group/cgroup.subtree_control" ]; then
      sed 's/\w*/+&/g' "$group/cgroup.controllers" >"$group/cgroup.subtree_control" 2>/dev/null || true
    fi
  done < <(hierarchies)
}

kill_pods() {
  local hierarchy pids deadline=$((SECONDS + 20))
  while read -r hierarchy; do
    [ -d "$hierarchy$CGROUP" ] || continue
    while pids=$(find "$hierarchy$CGROUP" -name cgroup.procs -exec cat {} + 2>/dev/null) && [ -n "$pids" ]; do
      [ "$SECONDS" -lt "$deadline" ] || fail "these processes of pods do not end: $(xargs <<<"$pids")"
      xargs -r kill -KILL <<<"$pids" 2>/dev/null || true
      sleep 0.1
    done
  done < <(hierarchies)
}

remove_cgroups() {
  local hierarchy
  while read -r hierarchy; do
    [ -d "$hierarchy$CGROUP" ] || continue
    find "$hierarchy$CGROUP" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done < <(hierarchies)
}

# Shims outlive containerd on purpose; ours are those that serve our socket. Their own sockets lie in a shared folder.
kill_shims() {
  local pid address
  while read -r address; do rm -f "${address#unix://}"; done < <(
    find "$OUTBOX_RUN/containerd" -maxdepth 4 -name address -exec awk 1 {} + 2>/dev/null
  )
  for pid in $(pgrep -f -x ".*containerd-shim-runc-v2 .*-address $SOCKET( .*)?" || true); do
    kill -KILL "$pid" 2>/dev/null || true
  done
}

# Forgets every container and keeps every image. True when there was something to forget.
forget_containers() {
  local ids id
  ids=$(ctr containers ls -q)
  [ -n "$ids" ] || return 1
  for id in $ids; do
    ctr tasks rm -f "$id" >/dev/null 2>&1 || true
    ctr containers rm "$id" >/dev/null 2>&1 || true
    # What the network plugins remember of it, in a shared folder.
    rm -f /var/lib/cni/results/*-"$id"-*
  done
  rm -rf "$OUTBOX_STATE"/containerd/io.containerd.grpc.v1.cri/{containers,sandboxes}/*
}

