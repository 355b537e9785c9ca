# shellcheck shell=bash disable=SC2034
# Shared by every script here: where things live, how a step is told, how something gets into the cache.

CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd "$CLUSTER_DIR/../../.." && pwd)
OUTBOX_CACHE=${OUTBOX_CACHE:-${HOME:?}/.cache/outbox-operator}
OUTBOX_STATE=${OUTBOX_STATE:-/var/lib/outbox-operator}
OUTBOX_RUN=${OUTBOX_RUN:-/run/outbox-operator}
# What is taken away later is named below these three: none may be a folder of the machine's own, or a relative one.
for place in "$OUTBOX_CACHE" "$OUTBOX_STATE" "$OUTBOX_RUN"; do
  case $place in
    */../* | */.. | */./* | */. | *//* | */ | /var/lib | /var/cache) ;;
    /*/*) continue ;;
  esac
  printf 'error: %s cannot be a folder of the local cluster: name one of its own, by its whole path\n' "$place" >&2
  exit 1
done
# One umask for all of it: what is unpacked here is read by postgres, by pods and by builds.
umask 022

# shellcheck source=tests/tools/cluster/versions.sh
source "$CLUSTER_DIR/versions.sh"

# Seconds since 1970, with six decimals. A run of several scripts has one clock: the first one's, in OUTBOX_BEGAN.
STARTED_AT=${OUTBOX_BEGAN:-$EPOCHREALTIME}

# Seconds since the run started, with one decimal.
elapsed() {
  local now=${EPOCHREALTIME}
  local ms=$(((${now/[.,]/} - ${STARTED_AT/[.,]/}) / 1000))
  printf '%d.%d' $((ms / 1000)) $((ms % 1000 / 100))
}

say() { printf '[%6s s] %s\n' "$(elapsed)" "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Seconds that the longest pieces of set-up took, on two processors and from registries nearby.
declare -A TAKES=([kubernetes]=420 [argocd]=240 [base]=40 [postgres]=65 [outbox-operator]=40
  [outbox-worker]=40 [outbox-spark]=90 [spark]=40)

# Kubernetes' programs and those that are built with them, in the cache.
kubernetes_programs() { echo "kubernetes/$KUBERNETES_VERSION-$(hash_of "$CLUSTER_DIR/modules/kubernetes")"; }

# Whether they, the longest piece, are still to be built.
cold() { [ ! -d "$OUTBOX_CACHE/$(kubernetes_programs)" ]; }

minutes() { awk -v s="$1" 'BEGIN {if (s < 90) printf "%d s", s; else printf "%.0f min", s / 60}'; }

# telling NAME FUNCTION ARGS...: says what is made and about how long that takes, and every ten seconds that it still is.
# Its status is FUNCTION's; called where that may be other than 0 without ending the script.
telling() {
  local name=$1 takes=${TAKES[${1%%[/:]*}]:-} ticker rc=0 shell=$BASHPID
  shift
  [ -z "$takes" ] || say "building $name: about $(minutes "$takes")"
  tick "$shell" "$name" "$takes" &
  ticker=$!
  # Without "||", which would switch errexit off inside FUNCTION.
  "$@"
  rc=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  return "$rc"
}

parent_of() { sed -n 's/^PPid:\t//p' "/proc/$1/status"; }

# tick PARENT NAME SECONDS: ends with the shell PARENT, however that ends, and does not hold its locks meanwhile.
tick() {
  local parent=$1 name=$2 takes=$3 began=$SECONDS every=${OUTBOX_TELL_EVERY:-10} own=$BASHPID fd next
  for fd in "${HELD_LOCKS[@]}"; do exec {fd}>&-; done
  next=$((began + every))
  while [ "$(parent_of "$own")" = "$parent" ]; do
    sleep 1 >/dev/null 2>&1
    [ "$SECONDS" -ge "$next" ] || continue
    say "still busy with $name: $(minutes $((SECONDS - began)))${takes:+ of about $(minutes "$takes")}"
    next=$((next + every))
  done
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
    say "waiting for another process that holds $file"
    flock "$fd"
  fi
  HELD_LOCKS+=("$fd")
  "$@"
  exec {fd}>&-
}

# unmount_below FOLDER: whatever is mounted inside of it, the innermost first.
unmount_below() {
  local mount
  while read -r mount; do umount -l "$(printf '%b' "$mount")" 2>/dev/null || true; done < <(
    awk -v place="$(realpath -m "$1")/" 'index($2, place) == 1 {print $2}' /proc/mounts | sort -r
  )
}

# remove_tree FOLDER: a half-made Debian has the machine's own /proc in it.
remove_tree() {
  unmount_below "$1"
  rm -rf --one-file-system "$1"
}

# cached DIR FUNCTION ARGS...: FUNCTION fills an empty folder, given as its first argument; it becomes DIR only when
# FUNCTION succeeded, by one rename. Does nothing when DIR is there. DIR is relative to the cache, or absolute. Called
# under one lock for everything that has DIR's parent, so what is half-made there is of a run that was killed.
cached() {
  local name=$1 dir=$1 make=$2
  shift 2
  case $dir in /*) ;; *) dir=$OUTBOX_CACHE/$dir ;; esac
  [ -d "$dir" ] && return 0
  mkdir -p "$(dirname "$dir")"
  local tmp
  for tmp in "$(dirname "$dir")"/.tmp-*; do
    if [ -d "$tmp" ]; then remove_tree "$tmp"; fi
  done
  tmp=$(mktemp -d "$(dirname "$dir")/.tmp-$(basename "$dir")-XXXXXX")
  chmod 755 "$tmp"
  # In a subshell of its own so that errexit holds inside FUNCTION whatever the caller tests.
  local rc=0
  set +e
  telling "$(basename "$(dirname "$dir")")/$(basename "$dir")" in_subshell "$make" "$tmp" "$@"
  rc=$?
  set -e
  if [ "$rc" != 0 ]; then
    remove_tree "$tmp"
    fail "could not make $name (exit $rc)"
  fi
  mv -T "$tmp" "$dir"
}

in_subshell() { (set -e; "$@"); }

# fetch_from_maven GROUP:NAME:VERSION:KIND SUM FOLDER: one file of Maven Central; another file than that of the sum is an error.
fetch_from_maven() {
  local artifact=$1 sum=$2 folder=$3 name version kind log
  IFS=: read -r _ name version kind <<<"$artifact"
  log=$OUTBOX_CACHE/logs/maven-$name.log
  command -v mvn >/dev/null || debian maven
  mkdir -p "$(dirname "$log")"
  mvn -B -q org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy "-Dartifact=$artifact" "-DoutputDirectory=$folder" \
    >"$log" 2>&1 || { tail -5 "$log" >&2; return 1; }
  # Maven itself only warns of a wrong sum.
  sha256sum --check --status <<<"$sum  $folder/$name-$version.$kind" ||
    fail "$name-$version.$kind is not the file whose sum versions.sh has"
}

# The hash of files and strings: hash_of FILE... ; folders count with every file in them, names included.
hash_of() {
  local path
  for path in "$@"; do
    [ -e "$path" ] || fail "$path is not there"
  done
  for path in "$@"; do
    if [ -d "$path" ]; then
      (cd "$path" && find . -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 -r sha256sum)
    else
      sha256sum <"$path"
    fi
  done | sha256sum | cut -c1-16
}

# debian PACKAGE...: installs what is missing. No service is started or enabled by that, and no package taken away: that
# would be Docker's own container runtime, for example.
debian() {
  local missing=() package
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return 0
  need_root "to install ${missing[*]}"
  with_lock "$OUTBOX_CACHE/locks/debian" telling "Debian packages" install_debian "${missing[@]}"
  say "Debian packages installed: ${missing[*]}"
}

install_debian() {
  local log=$OUTBOX_CACHE/logs/apt.log policy=/usr/sbin/policy-rc.d own='' mark='# by outbox-operator, while it installs'
  mkdir -p "$OUTBOX_CACHE/logs"
  # One of ours may be left of a run that was killed: no package of this machine would ever start a service again.
  if [ ! -e "$policy" ] || grep -qxF "$mark" "$policy"; then
    own=1
    printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >"$policy"
    chmod 755 "$policy"
  fi
  local rc=0
  {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &&
      apt-get install -y -qq --no-remove --no-install-recommends -o Dpkg::Options::=--force-confold "$@"
  } >"$log" 2>&1 </dev/null || rc=$?
  [ -z "$own" ] || rm -f "$policy"
  if [ "$rc" != 0 ]; then
    tail -20 "$log" >&2
    fail "apt-get could not install $* (whole log: $log)"
  fi
}

# keep_newest FOLDER N: of what every change of code or of a lock leaves behind.
keep_newest() {
  find "$1" -mindepth 1 -maxdepth 1 -not -name '.tmp-*' -printf '%T@ %p\n' | sort -rn | tail -n "+$(($2 + 1))" |
    cut -d' ' -f2- | xargs -r -d '\n' rm -rf --
}
