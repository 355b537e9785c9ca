# shellcheck shell=bash
# Part "monitoring": Prometheus and promtool from Debian. Tests start their own server, with data of their own.

setup_monitoring() {
  debian prometheus
  say "monitoring: ready ($(command -v prometheus), $(command -v promtool))"
}
