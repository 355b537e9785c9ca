#!/bin/bash
# Starts RabbitMQ with one user who may do everything.
#   RABBITMQ_DEFAULT_USER (outbox)   RABBITMQ_DEFAULT_PASS_FILE or RABBITMQ_DEFAULT_PASS
#   RABBITMQ_MANAGEMENT=1: the management plugin on port 15672
# Needs a writable /var/lib/rabbitmq (a volume).
set -euo pipefail
umask 077
password=${RABBITMQ_DEFAULT_PASS:-}
if [ -n "${RABBITMQ_DEFAULT_PASS_FILE:-}" ]; then password=$(cat "$RABBITMQ_DEFAULT_PASS_FILE"); fi
[ -n "$password" ] || { echo "RABBITMQ_DEFAULT_PASS_FILE or RABBITMQ_DEFAULT_PASS is needed" >&2; exit 1; }
cat >"$RABBITMQ_CONFIG_FILE" <<CONF
default_user = ${RABBITMQ_DEFAULT_USER:-outbox}
default_pass = $password
loopback_users = none
listeners.tcp.default = 5672
CONF
plugins=''
if [ "${RABBITMQ_MANAGEMENT:-}" = 1 ]; then plugins=rabbitmq_management; fi
echo "[$plugins]." >"$RABBITMQ_ENABLED_PLUGINS_FILE"
# fsGroup may have opened it to the group, which the server refuses.
if [ -f "$HOME/.erlang.cookie" ]; then chmod 400 "$HOME/.erlang.cookie"; fi
unset RABBITMQ_DEFAULT_USER RABBITMQ_DEFAULT_PASS
exec rabbitmq-server
