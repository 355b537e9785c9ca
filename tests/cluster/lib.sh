# shellcheck shell=bash disable=SC2034
# Shared by every script here: where things live, how a step is told, how something gets into the cache.

CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd "$CLUSTER_DIR/../.." && pwd)
OUTBOX_CACHE=${OUTBOX_CACHE:-${HOME:?}/.cache/outbox-operator}
OUTBOX_STATE=${OUTBOX_STATE:-/var/lib/outbox-operator}
OUTBOX_RUN=${OUTBOX_RUN:-/run/outbox-operator}
# One umask for all of it: what is unpacked here is read by postgres, by pods and by builds.
umask 022

# shellcheck source=tests/cluster/versions.sh
source "$CLUSTER_DIR/versions.sh"

STARTED_AT=${EPOCHREALTIME}

# Seconds since the script started, with one decimal.
elapsed() {
  local now=${EPOCHREALTIME}
  local ms=$(((${now/./} - ${STARTED_AT/./}) / 1000))
  printf '%d.%d' $((ms / 1000)) $((ms % 1000 / 100))
}

say() { printf '[%6ss] %s\n' "$(elapsed)" "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

need_root() { [ "$(id -u)" = 0 ] || fail "the local cluster needs root: $1"; }

# Descriptors of the locks this shell holds; what it starts for good must close them (see start_process).
HELD_LOCKS=()

# with_lock FILE FUNCTION ARGS...: one at a time on this machine; a later one waits and says so.
with_lock() {
  local file=$1 fd
  shift
  mkdir -p "$(dirname "$file")"
  exec {fd}>"$file"
  if ! flock -n "$fd"; then
    say "waiting for another run that holds $file"
    flock "$fd"
  fi
  HELD_LOCKS+=("$fd")
  "$@"
  exec {fd}>&-
}

# cached DIR FUNCTION ARGS...: FUNCTION fills an empty folder, given as its first argument; it becomes DIR only when
# FUNCTION succeeded, by one rename. Does nothing when DIR is there. DIR is relative to the cache, or absolute.
cached() {
  local name=$1 dir=$1 make=$2
  shift 2
  case $dir in /*) ;; *) dir=$OUTBOX_CACHE/$dir ;; esac
  [ -d "$dir" ] && return 0
  mkdir -p "$(dirname "$dir")"
  local tmp
  tmp=$(mktemp -d "$(dirname "$dir")/.tmp-$(basename "$dir")-XXXXXX")
  chmod 755 "$tmp"
  # In a subshell of its own so that errexit holds inside FUNCTION whatever the caller tests.
  local rc=0
  set +e
  (set -e; "$make" "$tmp" "$@")
  rc=$?
  set -e
  if [ "$rc" != 0 ]; then
    rm -rf "$tmp"
    fail "could not make $name (exit $rc)"
  fi
  mv -T "$tmp" "$dir"
}

# A folder's half-made predecessors, of runs that were killed. Only called under the lock of its maker.
sweep_unfinished() {
  find "$OUTBOX_CACHE" -maxdepth 3 -name '.tmp-*' -type d -prune -exec rm -rf {} + 2>/dev/null || true
}

# The hash of files and strings: hash_of FILE... ; folders count with every file in them, names included.
hash_of() {
  local path
  for path in "$@"; do
    [ -e "$path" ] || fail "$path is not there"
  done
  for path in "$@"; do
    if [ -d "$path" ]; then
      (cd "$path" && find . -type f -not -name '*.pyc' -not -path '*/.egg-info/*' -print0 | sort -z | xargs -0 -r sha256sum)
    else
      sha256sum <"$path"
    fi
  done | sha256sum | cut -c1-16
}

# debian PACKAGE...: installs what is missing. No service is started or enabled by that.
debian() {
  local missing=() package
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return 0
  need_root "to install ${missing[*]}"
  with_lock "$OUTBOX_CACHE/locks/debian" install_debian "${missing[@]}"
  say "Debian packages installed: ${missing[*]}"
}

install_debian() {
  local log=$OUTBOX_CACHE/logs/apt.log policy=/usr/sbin/policy-rc.d own=''
  mkdir -p "$OUTBOX_CACHE/logs"
  if [ ! -e "$policy" ]; then
    own=1
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  local rc=0
  {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &&
      apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "$@"
  } >"$log" 2>&1 </dev/null || rc=$?
  [ -z "$own" ] || rm -f "$policy"
  if [ "$rc" != 0 ]; then
    tail -20 "$log" >&2
    fail "apt-get could not install $* (whole log: $log)"
  fi
}
