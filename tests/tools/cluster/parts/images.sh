# shellcheck shell=bash
# Part "images": buildah, and the Debian base that our images stand on here. A user's own build takes a public base image.
# Part "built": the images themselves, which images.sh then only loads into the cluster.

setup_built() { "$CLUSTER_DIR/images.sh" --build; }

setup_images() {
  need_root "it unpacks a Debian system"
  debian buildah debootstrap debian-archive-keyring
  with_lock "$OUTBOX_CACHE/locks/base" cached "base/$DEBIAN_RELEASE" bootstrap_debian
  say "images: ready"
}

# A minimal Debian, from wherever this machine's apt gets its packages.
bootstrap_debian() {
  local out=$1 log=$OUTBOX_CACHE/logs/debootstrap.log mirror
  mkdir -p "$(dirname "$log")"
  # The archive of the release itself: not its updates, not its security fixes.
  # shellcheck disable=SC2016  # the format is apt's
  mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' | awk -v r="$DEBIAN_RELEASE" '$1 == r {print $2; exit}')
  [ -n "$mirror" ] || fail "apt knows no source of Debian $DEBIAN_RELEASE (apt-get update, then again)"
  debootstrap --force-check-gpg --variant=minbase --include=ca-certificates "$DEBIAN_RELEASE" "$out/root" "$mirror" >"$log" 2>&1 ||
    { tail -5 "$log" >&2; return 1; }
  rm -rf "$out/root"/var/cache/apt/*.bin "$out/root"/var/cache/apt/archives/*.deb "$out/root"/var/lib/apt/lists/* \
    "$out/root"/usr/share/{doc,locale,info}/* "$out/root"/var/log/*.log "$out/root"/dev/* "$out/root"/etc/apt/sources.list
  # The folders stay: packages make links in them.
  find "$out/root/usr/share/man" -type f -delete
  tar -C "$out/root" --numeric-owner -cf "$out/root.tar" .
  rm -rf "$out/root"
  say "Debian $DEBIAN_RELEASE unpacked"
}
