#!/usr/bin/env bash
# Stops the local cluster and takes away its processes, mounts, bridge and firewall chains. Keeps the cache and the images.
# usage: down.sh [--purge]      --purge: the images and certificates too
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for part in lib process owner network node control_plane teardown load build; do
  # shellcheck source=/dev/null
  source "$here/$part.sh"
done

take_down() {
  refuse_if_owned
  teardown
  rm -f "$KUBECONFIG_FILE"
}

# Not while another run builds: that one ends by itself what it mounted.
take_builds_down() {
  local fd
  [ -d "$OUTBOX_CACHE/locks" ] || return 0
  exec {fd}>"$OUTBOX_CACHE/locks/images"
  if flock -n "$fd"; then sweep_builds; fi
  exec {fd}>&-
}

need_root "it stops what root started"
if [ -d "$OUTBOX_STATE" ] || [ -d "$OUTBOX_RUN" ]; then with_lock "$OUTBOX_STATE/lock" take_down; fi
take_builds_down
if [ "${1:-}" = --purge ]; then rm -rf "$OUTBOX_STATE"; fi
say "down"
