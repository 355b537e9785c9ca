# shellcheck shell=bash disable=SC2034
# Every version the local cluster is made of. A changed version gets its own folder in the cache.

KUBERNETES_VERSION=1.34.4
ETCD_VERSION=3.6.16
COREDNS_VERSION=1.15.0
HELM_VERSION=3.22.0
UV_VERSION=0.13.8
# Server binaries beside Debian's own PostgreSQL 15: the oldest and the newest version the project promises.
POSTGRES_14_VERSION=14.20.0
POSTGRES_15_VERSION=15
POSTGRES_18_VERSION=18.1.0
DEBIAN_RELEASE=bookworm
