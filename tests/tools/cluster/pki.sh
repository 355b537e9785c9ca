# shellcheck shell=bash
# Certificates and kubeconfigs of the local cluster. Made once per state folder, good for ten years, readable by root.

PKI=$OUTBOX_STATE/pki

make_pki() {
  [ -f "$PKI/complete" ] && return 0
  rm -rf "$PKI"
  mkdir -p "$PKI"
  chmod 700 "$PKI"
  (
    cd "$PKI" || exit 1
    umask 077
    openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -keyout ca.key -out ca.crt -subj /CN=outbox-local 2>openssl.log
    local names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
    certificate apiserver /CN=kube-apiserver "$names,DNS:localhost,IP:127.0.0.1,IP:10.96.0.1,IP:$NODE_IP"
    certificate kubelet "/O=system:nodes/CN=system:node:$NODE_NAME" "DNS:$NODE_NAME,IP:127.0.0.1,IP:$NODE_IP"
    certificate admin /O=system:masters/CN=admin DNS:admin
    certificate provisioner /O=system:masters/CN=provisioner DNS:provisioner
    certificate controller-manager /CN=system:kube-controller-manager DNS:controller-manager
    certificate scheduler /CN=system:kube-scheduler DNS:scheduler
    certificate proxy /CN=system:kube-proxy DNS:proxy
    openssl genrsa -out service-accounts.key 2048 2>>openssl.log
    openssl rsa -in service-accounts.key -pubout -out service-accounts.pub 2>>openssl.log
    local user
    for user in kubelet admin provisioner controller-manager scheduler proxy; do kubeconfig "$user" >"$user.kubeconfig"; done
    touch complete
  )
}

# certificate NAME SUBJECT ALTERNATIVE-NAMES
certificate() {
  openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>>openssl.log
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -out "$1.crt" \
    -extfile <(echo "subjectAltName=$3") 2>>openssl.log
  rm "$1.csr"
}

# A kubeconfig that holds everything it needs, so that it can be copied.
kubeconfig() {
  cat <<YAML
apiVersion: v1
kind: Config
clusters:
- name: outbox-local
  cluster: {server: "https://127.0.0.1:6443", certificate-authority-data: $(base64 -w0 ca.crt)}
users:
- name: $1
  user: {client-certificate-data: $(base64 -w0 "$1.crt"), client-key-data: $(base64 -w0 "$1.key")}
contexts:
- name: outbox-local
  context: {cluster: outbox-local, user: $1}
current-context: outbox-local
YAML
}
