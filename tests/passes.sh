#!/usr/bin/env bash
# The tests that the arguments choose, in two passes; what they need is there already. Fails where both choose none.
set -euo pipefail
cd "$(dirname "$0")/.."
status=0 chosen=''
reports=${OUTBOX_CACHE:-$HOME/.cache/outbox-operator}/durations

run_tests() {
  local answer=0
  .venv/bin/python -m pytest -p no:randomly "$@" || answer=$?
  case $answer in
    0) chosen=yes ;;
    5) ;; # this pass has none of them
    *) chosen=yes status=1 ;;
  esac
}

# tests/conftest.py says what begins first, and when two of the processes wait.
run_tests -m "not calm" --numprocesses=6 --dist=loadscope --no-loadscope-reorder --durations=25 --junitxml="$reports/passes.xml" "$@"
# What promises seconds is measured while little else runs: these sleep most of their time.
run_tests -m calm --numprocesses=3 --dist=loadscope --no-loadscope-reorder --durations=5 --junitxml="$reports/calm.xml" "$@"
if [ -z "$chosen" ]; then
  echo "tests: no test is chosen by: $*" >&2
  status=5
fi
exit "$status"
