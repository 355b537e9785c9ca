# shellcheck shell=bash
# Part "chaos": what only `make chaos` needs. Toxiproxy is built from its Go module, whose version and sums are in modules/;
# the clock shim from its one C file (tests/tools/chaos/clock): both in the cache, by version or by hash.

setup_chaos() {
  need_root "for the network, process and mount namespaces that chaos runs in"
  debian gcc libc6-dev iproute2 util-linux
  with_lock "$OUTBOX_CACHE/locks/go-build" build_chaos
  mkdir -p "$OUTBOX_CACHE/bin"
  ln -sfn "../toxiproxy/$TOXIPROXY_VERSION/toxiproxy" "$OUTBOX_CACHE/bin/toxiproxy"
  ln -sfn "../stepclock/$(hash_of "$(clock_source)")/stepclock.so" "$OUTBOX_CACHE/bin/stepclock.so"
  say "chaos: ready ($OUTBOX_CACHE/bin/toxiproxy)"
}

clock_source() { echo "$CHECKOUT/tests/tools/chaos/clock/stepclock.c"; }

build_chaos() {
  cached "toxiproxy/$TOXIPROXY_VERSION" build_module toxiproxy github.com/Shopify/toxiproxy/v2/cmd/server
  cached "stepclock/$(hash_of "$(clock_source)")" build_clock
}

build_clock() {
  gcc -O2 -Wall -Wextra -Werror -shared -fPIC -o "$1/stepclock.so" "$(clock_source)" -ldl
  say "clock shim built"
}
