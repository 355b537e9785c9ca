#!/usr/bin/env bash
# Chaos, as `make chaos` runs it: sets up what it needs. Arguments go to the program (--help lists them).
#   OUTBOX_CHAOS_POSTGRES  the server's major version: 14, 15 (the default) or 18
set -euo pipefail
cd "$(dirname "$0")/../../.."
tests/tools/cluster/setup.sh python postgres rabbitmq kafka chaos
exec .venv/bin/python -m tests.tools.chaos "$@"
