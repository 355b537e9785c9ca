# shellcheck shell=bash
# Part "keda": KEDA's operator, metrics server and kinds, for tests/keda. Not among the parts that are set up when none is
# named: two processors build it in ten minutes, and `make test` does not need it.

setup_keda() {
  with_lock "$OUTBOX_CACHE/locks/go-build" cached "keda/$KEDA_VERSION" build_keda
  ln -sfn "$KEDA_VERSION" "$OUTBOX_CACHE/keda/current"
  say "keda: ready ($OUTBOX_CACHE/keda/current)"
}

build_keda() {
  local out=$1 module=github.com/kedacore/keda/v2
  go_build keda "" "$out/" "$module/cmd/operator" "$module/cmd/adapter"
  cp -r "$OUTBOX_CACHE/go/mod/$module@v$KEDA_VERSION/config/crd/bases" "$out/crds"
  chmod -R u+w "$out/crds"
  say "KEDA $KEDA_VERSION built"
}
