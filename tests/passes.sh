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

# Four processes keep two cores busy; with five, tests of the cluster took up to twice as long and the whole no less. tests/conftest.py says which of them begin first.
run_tests -m "not calm" --numprocesses=4 --dist=loadscope --no-loadscope-reorder --durations=25 --junitxml="$reports/passes.xml" "$@"
# What promises seconds is measured one after the other, while nothing else runs but a test that sleeps most of its time.
run_tests -m calm --numprocesses=2 --dist=loadscope --no-loadscope-reorder --durations=5 --junitxml="$reports/calm.xml" "$@"
if [ -z "$chosen" ]; then
  echo "tests: no test is chosen by: $*" >&2
  status=5
fi
exit "$status"
