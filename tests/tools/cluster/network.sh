# shellcheck shell=bash disable=SC2034
# The cluster's bridge, its firewall chains, and taking away every trace of both. Pods live behind one bridge that owns
# the node's address, so that the host reaches pods directly and Services through kube-proxy's rules.

BRIDGE=outbox0
NODE_NAME=outbox-local
NODE_IP=10.88.0.1
POD_CIDR=10.88.0.0/16
SERVICE_CIDR=10.96.0.0/16
DNS_IP=10.96.0.10
CNI_PLUGINS=/usr/lib/cni
SYSCTLS=(net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1)
# The kubelet sets these for the whole machine.
KUBELET_SYSCTLS=(vm.overcommit_memory kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes)

network_up() {
  modprobe -q br_netfilter 2>/dev/null || true
  mkdir -p "$OUTBOX_RUN"
  # What the machine had is remembered for network_down.
  sysctl -e "${SYSCTLS[@]%%=*}" "${KUBELET_SYSCTLS[@]}" | tr -d ' ' >"$OUTBOX_RUN/sysctls"
  sysctl -qew "${SYSCTLS[@]}"
  if ! ip link show "$BRIDGE" >/dev/null 2>&1; then
    if ip -4 -o addr show | grep -q " ${NODE_IP%.*}\."; then
      fail "another network of this machine has addresses in ${NODE_IP%.*}.0/24, which the local cluster uses"
    fi
    ip link add "$BRIDGE" type bridge
  fi
  ip addr replace "$NODE_IP/16" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  firewall_up
  mkdir -p "$OUTBOX_STATE/cni"
  cat >"$OUTBOX_STATE/cni/10-outbox.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "outbox", "plugins": [
  {"type": "bridge", "bridge": "$BRIDGE", "isGateway": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$OUTBOX_RUN/ipam", "routes": [{"dst": "0.0.0.0/0", "gw": "$NODE_IP"}],
            "ranges": [[{"subnet": "$POD_CIDR", "rangeStart": "10.88.0.10", "rangeEnd": "10.88.3.250", "gateway": "$NODE_IP"}]]}}]}
JSON
}

firewall_up() {
  # A machine with Docker drops what is forwarded; and what leaves the machine must carry its address.
  iptables -w -N OUTBOX-FORWARD 2>/dev/null || iptables -w -F OUTBOX-FORWARD
  iptables -w -A OUTBOX-FORWARD -i "$BRIDGE" -j ACCEPT
  iptables -w -A OUTBOX-FORWARD -o "$BRIDGE" -j ACCEPT
  iptables -w -C FORWARD -j OUTBOX-FORWARD 2>/dev/null || iptables -w -A FORWARD -j OUTBOX-FORWARD
  iptables -w -t nat -N OUTBOX-POSTROUTING 2>/dev/null || iptables -w -t nat -F OUTBOX-POSTROUTING
  iptables -w -t nat -A OUTBOX-POSTROUTING -s "$POD_CIDR" ! -d "$POD_CIDR" -j MASQUERADE
  iptables -w -t nat -C POSTROUTING -j OUTBOX-POSTROUTING 2>/dev/null ||
    iptables -w -t nat -A POSTROUTING -j OUTBOX-POSTROUTING
}

network_down() {
  ip link del "$BRIDGE" 2>/dev/null || true
  local family table
  for family in iptables ip6tables; do
    for table in mangle nat filter raw; do firewall_down "$family" "$table"; done
  done
  if [ -f "$OUTBOX_RUN/sysctls" ]; then
    local setting
    while read -r setting; do sysctl -qew "$setting" || true; done <"$OUTBOX_RUN/sysctls"
    rm -f "$OUTBOX_RUN/sysctls"
  fi
  rm -rf "$OUTBOX_RUN/ipam"
}

# Deletes our chains, kube-proxy's and the kubelet's, and the rules that jump to them; leaves every other rule as it is.
# up.sh made sure that no other Kubernetes had such chains here.
firewall_down() {
  local family=$1 table=$2 rules
  rules=$("$family-save" -t "$table" 2>/dev/null) || return 0
  grep -qE '^:(KUBE|OUTBOX)-' <<<"$rules" || return 0
  {
    echo "*$table"
    sed -nE '/^-A (KUBE|OUTBOX)-/d; /^-A .*-[jg] (KUBE|OUTBOX)-/s/^-A /-D /p' <<<"$rules"
    sed -nE 's/^:((KUBE|OUTBOX)-[^ ]+) .*/-F \1/p' <<<"$rules"
    sed -nE 's/^:((KUBE|OUTBOX)-[^ ]+) .*/-X \1/p' <<<"$rules"
    echo COMMIT
  } | "$family-restore" -w 5 --noflush
}
