#!/bin/bash
# Starts PostgreSQL on $PGDATA, made on the first start. Arguments go to the server (for example: -c wal_level=logical).
# POSTGRES_PASSWORD_FILE or POSTGRES_PASSWORD is that of the user postgres.
# Needs a writable $PGDATA's parent (a volume) and /tmp (its socket).
set -euo pipefail
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  password=${POSTGRES_PASSWORD:-}
  if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then password=$(cat "$POSTGRES_PASSWORD_FILE"); fi
  [ -n "$password" ] || { echo "POSTGRES_PASSWORD_FILE or POSTGRES_PASSWORD is needed" >&2; exit 1; }
  # Made aside and renamed: a container killed in the middle leaves nothing that looks like a database.
  new=$PGDATA.new
  rm -rf "$new"
  initdb -D "$new" --username=postgres --pwfile=<(printf '%s\n' "$password") --auth-host=scram-sha-256 --auth-local=trust \
    --encoding=UTF8 --locale=C.UTF-8
  echo 'host all all all scram-sha-256' >>"$new/pg_hba.conf"
  echo 'host replication all all scram-sha-256' >>"$new/pg_hba.conf"
  rm -rf "$PGDATA"
  mv "$new" "$PGDATA"
fi
# fsGroup may have opened it to the group's write, which the server refuses.
chmod 700 "$PGDATA"
unset POSTGRES_PASSWORD
exec postgres -D "$PGDATA" -c 'listen_addresses=*' -c unix_socket_directories=/tmp "$@"
