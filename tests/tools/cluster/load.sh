# shellcheck shell=bash
# Getting images into the cluster's container runtime. Needs node.sh.

# What was loaded last under a name: a key of its content. Lives beside the images it speaks of.
LOADED=$OUTBOX_STATE/loaded

loaded() { [ "$(cat "$LOADED/$1" 2>/dev/null)" = "$2" ] && [ -n "$(ctr images ls -q "name==localhost/$(tagged "$1")")" ]; }

set_loaded() {
  mkdir -p "$LOADED"
  echo "$2" >"$LOADED/$1"
}

# A name without a tag is this checkout's own.
tagged() { case $1 in *:*) echo "$1" ;; *) echo "$1:dev" ;; esac; }

# load_binary NAME PROGRAM: an image of one static program.
load_binary() {
  local key
  key=$(hash_of "$2")
  loaded "$1" "$key" && return 0
  python3 "$CLUSTER_DIR/oci_archive.py" binary "localhost/$(tagged "$1")" "$2" | ctr images import - >/dev/null
  set_loaded "$1" "$key"
}

# load_built NAME: an image of our store (build.sh). Layers that the runtime has are not sent again.
load_built() {
  local name=$1 id
  id=$(buildah inspect --type image --format '{{.FromImageID}}' "localhost/$(tagged "$name")")
  loaded "$name" "$id" && return 0
  ctr content ls -q |
    python3 "$CLUSTER_DIR/oci_archive.py" store "localhost/$(tagged "$name")" "$STORE" "$id" |
    ctr images import - >/dev/null
  set_loaded "$name" "$id"
  say "$name loaded"
}
