# shellcheck shell=bash
# The processes of the local cluster. A process is ours when the identity recorded at its start still holds: pid, start
# time and boot. A pid alone may have been given to somebody else since.

PIDS=$OUTBOX_RUN/pids
LOGS=$OUTBOX_STATE/logs

# "start-time boot-id" of a running process, nothing for one that is gone or a zombie.
identity() {
  local stat state
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  stat=${stat##*) } # the command's name may hold blanks and brackets
  state=${stat%% *}
  [ "$state" != Z ] || return 0
  printf '%s %s' "$(cut -d' ' -f20 <<<"$stat")" "$(cat /proc/sys/kernel/random/boot_id)"
}

# same_process PID IDENTITY
same_process() { [ -n "$2" ] && [ "$(identity "$1")" = "$2" ]; }

# recorded NAME: prints the pid if that process runs, fails otherwise.
recorded() {
  local pid id
  [ -f "$PIDS/$1" ] && read -r pid id <"$PIDS/$1" && [ -n "$pid" ] || return 1
  same_process "$pid" "$id" || return 1
  echo "$pid"
}

# start_process NAME COMMAND...: in a session of its own, so that it outlives this shell and its terminal. Go collects its
# garbage later than by default: for the API server that was a quarter of its processor time.
start_process() {
  local name=$1 pid
  shift
  mkdir -p "$PIDS" "$LOGS"
  (
    cd "$OUTBOX_STATE" || exit 1
    for fd in ${HELD_LOCKS[@]+"${HELD_LOCKS[@]}"}; do exec {fd}>&-; done
    GOGC=400 GOMEMLIMIT=2GiB exec setsid nohup "$@" </dev/null >"$LOGS/$name.log" 2>&1
  ) &
  pid=$!
  echo "$pid $(identity "$pid")" >"$PIDS/$name"
}

# stop_process NAME...: TERM to all of them, then KILL to those that stay.
stop_process() {
  local name pid deadline=$((SECONDS + 10))
  for name in "$@"; do
    if pid=$(recorded "$name"); then kill -TERM "$pid" 2>/dev/null || true; fi
  done
  for name in "$@"; do
    while pid=$(recorded "$name") && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.05; done
    if pid=$(recorded "$name"); then kill -KILL "$pid" 2>/dev/null || true; fi
    while recorded "$name" >/dev/null && [ "$SECONDS" -lt $((deadline + 5)) ]; do sleep 0.05; done
    rm -f "$PIDS/$name"
  done
}

# wait_for SECONDS WHAT COMMAND...
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || fail "$what did not come in time (logs: $LOGS)"
    sleep 0.2
  done
}

# The program that listens on a TCP port, as "pid name"; nothing when the port is free.
listener() {
  ss -Hltnp "sport = :$1" 2>/dev/null | sed -nE 's/.*users:\(\("([^"]+)",pid=([0-9]+).*/\2 \1/p' | head -1
}
