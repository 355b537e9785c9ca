# shellcheck shell=bash
# Part "rabbitmq": the server's programs. Tests start their own, with data of their own.

setup_rabbitmq() {
  debian rabbitmq-server
  say "rabbitmq: ready (/usr/lib/rabbitmq/bin)"
}
