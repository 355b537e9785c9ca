#!/usr/bin/env bash
# Builds images and loads them into the local cluster; what has not changed is neither built nor loaded again.
# usage: images.sh [base|python|postgres|rabbitmq|operator|worker|spark ...]      without a name: the last five
#        images.sh --build [NAME ...]      builds them only; needs no cluster
#        images.sh --push REGISTRY/PREFIX [TAG]      builds ours (operator, worker, spark) and pushes them; needs no cluster
# With KUBECONFIG set to a cluster of the user's own they are pushed to OUTBOX_REGISTRY instead, for example
# OUTBOX_REGISTRY=registry.mycompany.net/team.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for part in lib process owner network pki node control_plane load build parts/python parts/images parts/cluster; do
  # shellcheck source=/dev/null
  source "$here/$part.sh"
done
declare -A NAMES=([base]=outbox-base [python]=outbox-python [postgres]=postgres:15 [rabbitmq]=rabbitmq:3.10
  [operator]=outbox-operator [worker]=outbox-worker [spark]=outbox-spark)

build_and_load() {
  local image
  sweep_builds
  for image in "$@"; do
    "build_$image"
    [ -z "$then" ] || telling "${then}ing ${NAMES[$image]}" "${then}_built" "${NAMES[$image]}"
  done
}

# push_built NAME: to the registry, under the tag asked for.
push_built() {
  local built target
  built=$(tagged "$1")
  target=$registry/${built%:*}:${tag:-${built##*:}}
  buildah push --quiet "localhost/$built" "$target" ||
    fail "$target cannot be pushed: may you (buildah login ${registry%%/*}), and is the registry there?"
  say "$target pushed"
}

registry='' tag='' then=load
if [ "${1:-}" = --build ]; then
  then=''
  shift
elif [ "${1:-}" = --push ]; then
  registry=${2:-} tag=${3:-dev}
  [[ $registry =~ ^[A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]+)?(/[a-z0-9._-]+)*$ ]] ||
    fail "push where? make push TO=registry.mycompany.net/outbox: host, perhaps a port, and a path; no scheme"
  then=push
  set -- operator worker spark
fi
[ $# -gt 0 ] || set -- postgres rabbitmq operator worker spark
for image in "$@"; do [ -n "${NAMES[$image]:-}" ] || fail "no image '$image': one of ${!NAMES[*]}"; done
if [ -n "$registry" ] || [ -z "$then" ]; then
  : # whatever cluster is up
elif [ -n "${KUBECONFIG:-}" ] && [ "$KUBECONFIG" != "$KUBECONFIG_FILE" ]; then
  registry=${OUTBOX_REGISTRY:-}
  then=push
  [ -n "$registry" ] || fail "KUBECONFIG is a cluster of yours: name the registry it takes images from in OUTBOX_REGISTRY"
else
  refuse_if_owned
  recorded containerd >/dev/null || fail "the local cluster is not up (up.sh starts it)"
fi
need_root "it builds images"
setup_images
with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
with_lock "$OUTBOX_CACHE/locks/images" build_and_load "$@"
say "images ready: $*"
[ -z "$tag" ] || say "install them: helm install outbox-operator charts/outbox-operator --namespace outbox-system \
  --create-namespace --set image.registry=$registry --set image.tag=$tag"
