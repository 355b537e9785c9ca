# shellcheck shell=bash
# Part "cluster": what the local cluster runs on. Debian has the container runtime and the network plugins; Kubernetes,
# etcd, CoreDNS and Helm are built from Go modules whose versions and sums are in modules/.

setup_cluster() {
  need_root "to install its container runtime"
  debian runc containerd containernetworking-plugins iptables conntrack iproute2 socat openssl procps util-linux
  with_lock "$OUTBOX_CACHE/locks/go-build" build_cluster
  mkdir -p "$OUTBOX_CACHE/bin"
  local tool
  for tool in "kubernetes/$KUBERNETES_VERSION/kubectl" "helm/$HELM_VERSION/helm"; do
    ln -sfn "../$tool" "$OUTBOX_CACHE/bin/$(basename "$tool")"
  done
  say "cluster: ready (kubectl and helm are in $OUTBOX_CACHE/bin)"
}

build_cluster() {
  cached "kubernetes/$KUBERNETES_VERSION" build_kubernetes
  cached "$(node_tools)" build_node_tools
  cached "etcd/$ETCD_VERSION" build_module etcd go.etcd.io/etcd/server/v3
  cached "coredns/$COREDNS_VERSION" build_module coredns ./server
  cached "helm/$HELM_VERSION" build_module helm helm.sh/helm/v3/cmd/helm
}

# Some gigabytes of sources and object files: the parts of one run share them, no later run looks at them. A run that
# builds now drops them itself.
drop_go_sources() { flock -n "$OUTBOX_CACHE/locks/go-build" rm -rf "$OUTBOX_CACHE/go" || true; }

# Our own two small programs: the volume provisioner and the process that holds a pod's namespaces.
node_tools() {
  local module=$CLUSTER_DIR/modules/kubernetes
  echo "node-tools/$(hash_of "$module/go.mod" "$module/provisioner" "$module/pause")"
}

# Puts a Go that is new enough first on the PATH. Go's own toolchains are modules too: any older one, Debian's for
# example, can fetch them.
use_go() {
  local minor
  minor=$(go env GOVERSION 2>/dev/null | sed -nE 's/^go1\.([0-9]+).*/\1/p') || true
  [ "${minor:-0}" -lt "$(cut -d. -f2 <<<"$GO_VERSION")" ] || return 0
  command -v go >/dev/null || debian golang-go
  cached "go-toolchain/$GO_VERSION" fetch_go
  unset GOROOT
  PATH=$OUTBOX_CACHE/go-toolchain/$GO_VERSION/bin:$PATH
}

fetch_go() {
  local out=$1 module=golang.org/toolchain version=v0.0.1-go$GO_VERSION.linux-amd64 sum
  sum=$(cd "$out" && GOFLAGS='' GOWORK=off GOMODCACHE=$out/mod go mod download -json "$module@$version" |
    sed -nE 's/.*"Sum": "([^"]*)".*/\1/p')
  [ "$sum" = "$GO_SUM" ] || fail "$module $version is not the one whose sum versions.sh has"
  cp -r "$out/mod/$module@$version/." "$out"
  # A module's files are neither executable nor to be changed.
  chmod -R u+w "$out"
  chmod -R a+x "$out/bin" "$out/pkg/tool"
  rm -rf "$out/mod"
  say "Go $GO_VERSION fetched"
}

# go_build MODULE LDFLAGS OUT PACKAGE...
go_build() {
  local module=$1 ldflags=$2 out=$3
  shift 3
  use_go
  local log=$OUTBOX_CACHE/logs/go-$module.log
  mkdir -p "$OUTBOX_CACHE/logs"
  if ! (cd "$CLUSTER_DIR/modules/$module" &&
    GOMODCACHE=$OUTBOX_CACHE/go/mod GOCACHE=$OUTBOX_CACHE/go/build GOFLAGS=-modcacherw CGO_ENABLED=0 GOWORK=off \
      nice -n 10 go build -buildvcs=false -trimpath -ldflags "-s -w $ldflags" -o "$out" "$@" >"$log" 2>&1); then
    tail -20 "$log" >&2
    return 1
  fi
}

build_kubernetes() {
  local out=$1 version=k8s.io/component-base/version minor
  minor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")
  go_build kubernetes \
    "-X $version.gitVersion=v$KUBERNETES_VERSION -X $version.gitMajor=1 -X $version.gitMinor=$minor" "$out/" \
    k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy,kubectl}
  say "Kubernetes $KUBERNETES_VERSION built"
}

build_node_tools() {
  go_build kubernetes "" "$1/" ./provisioner ./pause
  say "volume provisioner and pause built"
}

build_module() {
  local out=$1 name=$2 package=$3
  go_build "$name" "" "$out/$name" "$package"
  say "$name built"
}
