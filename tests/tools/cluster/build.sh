# shellcheck shell=bash
# Building one image: build_NAME writes it into our own image store and prints a key of everything it was made from.
# Nothing is built whose key is the one of last time.

STORE=$OUTBOX_CACHE/buildah
STAGE=$OUTBOX_CACHE/stage
BUILT=$OUTBOX_CACHE/built

buildah() {
  # A program's own configuration is not asked: the store is ours alone, and no daemon or user namespace is needed.
  command buildah --root "$STORE" --runroot /run/outbox-buildah --storage-driver overlay "$@"
}

# What builds that were killed left: their containers, mounted. Under the lock of images.sh there are no others.
sweep_builds() {
  [ ! -d "$STORE" ] || buildah rm --all >/dev/null 2>&1 || true
}

built() { [ "$(cat "$BUILT/$1" 2>/dev/null)" = "$2" ] && buildah inspect --type image "localhost/$(tagged "$1")" >/dev/null 2>&1; }

# build NAME KEY DOCKERFILE CONTEXT OPTION...: does nothing when the image of that key is there.
build() {
  local name=$1 key=$2 dockerfile=$3 context=$4 log=$OUTBOX_CACHE/logs/image-${1%%:*}.log
  shift 4
  built "$name" "$key" && return 0
  mkdir -p "$BUILT" "$(dirname "$log")"
  # Packages come from where this machine gets its own, and none of that stays in the image. A copy: packages write there.
  rm -rf "$STAGE/apt"
  mkdir -p "$STAGE"
  # With its modes: there may be passwords in it.
  cp -rL --preserve=mode /etc/apt "$STAGE/apt"
  local rc=0
  telling "${name%%:*}" build_image "$log" "$@" --file "$dockerfile" --tag "localhost/$(tagged "$name")" "$context" ||
    rc=$?
  rm -rf "$STAGE/apt"
  if [ "$rc" != 0 ]; then
    tail -20 "$log" >&2
    fail "could not build $name (whole log: $log)"
  fi
  echo "$key" >"$BUILT/$name"
  # The image that had the name before; layers that others stand on stay.
  buildah rmi --prune >/dev/null 2>&1 || true
  say "$name built"
}

build_image() {
  local log=$1
  shift
  buildah bud --isolation chroot --network host --layers --volume "$STAGE/apt:/etc/apt" "$@" >"$log" 2>&1
}

key_of() { cat "$BUILT/$1"; }

build_base() {
  local base=$OUTBOX_CACHE/base/$DEBIAN_RELEASE
  # The folder's name is its key: a new release is a new folder.
  build outbox-base "$DEBIAN_RELEASE-$(hash_of "$CLUSTER_DIR/images/base")" "$CLUSTER_DIR/images/base/Dockerfile" "$base"
}

build_python() {
  build_base
  build_on_base outbox-python python
}

build_postgres() {
  build_base
  build_on_base postgres:15 postgres
}

build_rabbitmq() {
  build_base
  build_on_base rabbitmq:3.10 rabbitmq
}

build_on_base() {
  local folder=$CLUSTER_DIR/images/$2
  build "$1" "$(key_of outbox-base)-$(hash_of "$folder")" "$folder/Dockerfile" "$folder" \
    --build-arg BASE_IMAGE=localhost/outbox-base:dev
}

build_operator() { build_project outbox-operator operator/Dockerfile operator/requirements.lock; }

build_worker() { build_project outbox-worker worker/Dockerfile worker/requirements.lock; }

build_spark() {
  build_project outbox-spark worker/Dockerfile.spark worker/requirements-spark.lock worker/spark-entrypoint.sh \
    worker/src/outbox_spark/classes.py
}

# build_project NAME DOCKERFILE LOCK FILE...: as a user would, but on our base and from wheels made outside.
build_project() {
  local name=$1 dockerfile=$2 lock=$3 wheels stage=$STAGE/$1 file key
  shift 3
  build_python
  build_wheel
  wheels=wheels/$(hash_of "$CHECKOUT/$lock")
  key=$(key_of outbox-python)-$(cd "$CHECKOUT" && hash_of "$dockerfile" "$lock" "$@")-$WHEEL_KEY
  built "$name" "$key" && return 0
  cached "$wheels" collect_wheels "$CHECKOUT/$lock"
  keep_newest "$OUTBOX_CACHE/wheels" 6
  # Only what the Dockerfile copies: a context of the whole checkout would be read in full each time.
  rm -rf "$stage"
  mkdir -p "$stage"
  for file in "$lock" "$@"; do install -D "$CHECKOUT/$file" "$stage/$file"; done
  cp -r "$OUTBOX_CACHE/dist/$WHEEL_KEY" "$stage/dist"
  # One time stamp for all, for a layer's content to depend on the files only.
  find "$stage" -exec touch -h -d @0 {} +
  build "$name" "$key" "$CHECKOUT/$dockerfile" "$stage" --build-arg BASE_IMAGE=localhost/outbox-python:dev \
    --build-context "wheelhouse=$OUTBOX_CACHE/$wheels"
  rm -rf "$stage"
}

# Every wheel of a lock, checked against its hashes here: the build has no index to compare with.
collect_wheels() {
  local log=$OUTBOX_CACHE/logs/wheels.log
  "$(dirname "$UV")/python" -m pip wheel --quiet --disable-pip-version-check --require-hashes --no-deps \
    --wheel-dir "$1" -r "$2" >"$log" 2>&1 || { tail -5 "$log" >&2; return 1; }
  say "wheels of ${2#"$CHECKOUT/"} collected"
}

# The project's wheel, once for all three images, which then hold the same code. Sets WHEEL_KEY.
build_wheel() {
  [ -z "${WHEEL_KEY:-}" ] || return 0
  WHEEL_KEY=$(cd "$CHECKOUT" && hash_of pyproject.toml operator/src worker/src sql)
  cached "dist/$WHEEL_KEY" make_wheel
  keep_newest "$OUTBOX_CACHE/dist" 5
}

make_wheel() {
  # In a copy: setuptools leaves folders behind.
  mkdir "$1/src"
  (cd "$CHECKOUT" && cp -r --parents pyproject.toml README.md LICENSE operator/src worker/src sql "$1/src/")
  find "$1/src" -name '*.egg-info' -prune -exec rm -rf {} +
  "$UV" build --quiet --wheel --out-dir "$1" "$1/src"
  rm -rf "$1/src" "$1/.gitignore"
  say "the project's wheel built"
}
