# shellcheck shell=bash
# Part "argocd": Argo CD's application controller and repository server, its resource definitions, and a program that
# reads objects as Helm 4 and Flux do. Built from Go modules, whose versions and sums are in modules/argocd. Redis is Debian's.

setup_argocd() {
  need_root "to install the Redis that Argo CD keeps its cache in"
  debian git redis-server
  with_lock "$OUTBOX_CACHE/locks/go-build" cached "$(argocd_programs)" build_argocd
  mkdir -p "$OUTBOX_CACHE/bin"
  ln -sfnT "../$(argocd_programs)" "$OUTBOX_CACHE/bin/argocd"
  say "argocd: ready ($OUTBOX_CACHE/bin/argocd)"
}

argocd_programs() { echo "argocd/$ARGOCD_VERSION-$(hash_of "$CLUSTER_DIR/modules/argocd")"; }

build_argocd() {
  local out=$1 program
  go_build argocd "-X github.com/argoproj/argo-cd/v3/common.version=$ARGOCD_VERSION" "$out/" ./server ./kstatus
  # The name by which it is called chooses the component.
  for program in argocd-application-controller argocd-repo-server argocd-git-ask-pass; do ln -s server "$out/$program"; done
  cp -r "$OUTBOX_CACHE/go/mod/github.com/argoproj/argo-cd/v3@v$ARGOCD_VERSION/manifests/crds" "$out/crds"
  say "Argo CD $ARGOCD_VERSION built"
}
