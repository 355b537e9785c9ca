# shellcheck shell=bash
# Who is using the cluster: one line, "pid start-time boot-id description". A run that was killed owns nothing, because
# its identity no longer holds. Needs process.sh.

OWNER_FILE=$OUTBOX_STATE/owner

# The pid and description of the run that uses the cluster, when there is one.
owner() {
  local pid start boot text
  [ -f "$OWNER_FILE" ] && read -r pid start boot text <"$OWNER_FILE" || return 1
  same_process "$pid" "$start $boot" || return 1
  echo "$pid $text"
}

# Whether PID is this process or one that started it.
is_ancestor() {
  local pid=$$ stat
  while [ "$pid" -gt 1 ]; do
    [ "$pid" = "$1" ] && return 0
    stat=$(cat "/proc/$pid/stat" 2>/dev/null) || return 1
    stat=${stat##*) }
    pid=$(cut -d' ' -f2 <<<"$stat")
  done
  return 1
}

# Ends with a clear word when another run, which is not the caller's own, uses the cluster.
refuse_if_owned() {
  local who
  who=$(owner) || return 0
  is_ancestor "${who%% *}" || fail "the local cluster is in use by process ${who%% *} (${who#* }): wait for it or end it"
}

# claim PID DESCRIPTION: under the lock of up.sh.
claim() {
  local id
  id=$(identity "$1")
  [ -n "$id" ] || fail "no process $1 to own the cluster"
  echo "$1 $id $2" >"$OWNER_FILE.new"
  mv "$OWNER_FILE.new" "$OWNER_FILE"
}
