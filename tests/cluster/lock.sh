#!/usr/bin/env bash
# Recomputes the four locks from pyproject.toml: exact versions with hashes, no address of any index.
# usage: lock.sh [--upgrade]      without it, versions that still fit stay
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/lib.sh
source "$here/lib.sh"
# shellcheck source=tests/cluster/parts/python.sh
source "$here/parts/python.sh"

# compile FILE OPTION...
compile() {
  local file=$1
  shift
  "$UV" pip compile --quiet --no-progress --generate-hashes --no-emit-index-url --no-header --no-annotate \
    --python-version 3.11 --output-file "$file" "$@" pyproject.toml
  say "$file"
}

with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
cd "$CHECKOUT"
compile requirements.lock --all-extras "$@"
compile operator/requirements.lock --extra operator "$@"
compile worker/requirements.lock --extra worker "$@"
compile worker/requirements-spark.lock --extra spark "$@"
