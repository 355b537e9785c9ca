#!/bin/bash
# Starts RabbitMQ with one user who may do everything: RABBITMQ_DEFAULT_USER, with the password in RABBITMQ_DEFAULT_PASS_FILE.
# Needs a writable /var/lib/rabbitmq (a volume).
set -euo pipefail
umask 077
password=$(cat "$RABBITMQ_DEFAULT_PASS_FILE")
cat >"$RABBITMQ_CONFIG_FILE" <<CONF
default_user = $RABBITMQ_DEFAULT_USER
default_pass = $password
loopback_users = none
listeners.tcp.default = 5672
CONF
echo '[].' >"$RABBITMQ_ENABLED_PLUGINS_FILE"
# fsGroup may have opened it to the group, which the server refuses.
if [ -f "$HOME/.erlang.cookie" ]; then chmod 400 "$HOME/.erlang.cookie"; fi
unset RABBITMQ_DEFAULT_USER
exec rabbitmq-server
