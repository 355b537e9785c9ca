# shellcheck shell=bash
# etcd, the API server and their companions. Their data does not outlive the cluster, so nothing waits for the disk.

KUBERNETES=$OUTBOX_CACHE/$(kubernetes_programs)
KUBECONFIG_FILE=$OUTBOX_STATE/kubeconfig
PORTS=(2379 2380 6443 10248 10249 10250 10256 10257 10259)

kubectl() { KUBECONFIG=$KUBECONFIG_FILE "$OUTBOX_CACHE/bin/kubectl" "$@"; }

# start_before_tests NAME COMMAND...: the control plane of a real cluster has a machine of its own. Here tests use every
# core, and an API server that answers after seconds ends the operators under test.
start_before_tests() {
  local name=$1
  shift
  start_process "$name" nice -n -10 "$@"
}

etcd_up() {
  start_before_tests etcd "$KUBERNETES/etcd" --data-dir "$OUTBOX_STATE/etcd" --unsafe-no-fsync \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380
}

apiserver_up() {
  start_before_tests apiserver "$KUBERNETES/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 \
    --advertise-address="$NODE_IP" --secure-port=6443 --service-cluster-ip-range="$SERVICE_CIDR" \
    --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" --client-ca-file="$PKI/ca.crt" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-signing-key-file="$PKI/service-accounts.key" --service-account-key-file="$PKI/service-accounts.pub" \
    --kubelet-client-certificate="$PKI/admin.crt" --kubelet-client-key="$PKI/admin.key" \
    --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP
}

controllers_up() {
  start_before_tests controller-manager "$KUBERNETES/kube-controller-manager" \
    --kubeconfig="$PKI/controller-manager.kubeconfig" --root-ca-file="$PKI/ca.crt" \
    --service-account-private-key-file="$PKI/service-accounts.key" --use-service-account-credentials \
    --leader-elect=false --bind-address=127.0.0.1 --flex-volume-plugin-dir="$OUTBOX_STATE/volume-plugins"
  start_before_tests scheduler "$KUBERNETES/kube-scheduler" --kubeconfig="$PKI/scheduler.kubeconfig" \
    --leader-elect=false --bind-address=127.0.0.1
  start_before_tests proxy "$KUBERNETES/kube-proxy" --kubeconfig="$PKI/proxy.kubeconfig" --proxy-mode=iptables \
    --cluster-cidr="$POD_CIDR" --hostname-override="$NODE_NAME" --iptables-localhost-nodeports=false \
    --iptables-min-sync-period=100ms \
    --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0
  mkdir -p "$OUTBOX_STATE/volumes"
  start_process provisioner "$KUBERNETES/provisioner" -kubeconfig "$PKI/provisioner.kubeconfig" \
    -root "$OUTBOX_STATE/volumes" -node "$NODE_NAME"
}

refuse_foreign() {
  local port who
  for port in "${PORTS[@]}"; do
    who=$(listener "$port")
    [ -z "$who" ] || fail "port $port belongs to process $who, which the local cluster did not start and will not touch"
  done
  if [ ! -f "$OUTBOX_RUN/sysctls" ] && iptables-save 2>/dev/null | grep -q '^:KUBE-'; then
    fail "this machine has firewall rules of another Kubernetes (iptables-save | grep KUBE-); the local cluster would break them"
  fi
}
