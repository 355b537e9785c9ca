# shellcheck shell=bash
# Part "kafka": a Kafka broker's jars in $OUTBOX_CACHE/kafka/VERSION, and a Java to run them. Tests start their own broker.

setup_kafka() {
  command -v java >/dev/null || debian openjdk-17-jre-headless
  with_lock "$OUTBOX_CACHE/locks/kafka" cached "kafka/$KAFKA_VERSION" fetch_kafka
  say "kafka: ready ($OUTBOX_CACHE/kafka/$KAFKA_VERSION)"
}

fetch_kafka() {
  local out=$1 module=$CLUSTER_DIR/modules/kafka log=$OUTBOX_CACHE/logs/maven-kafka.log
  command -v mvn >/dev/null || debian maven
  mkdir -p "$(dirname "$log")"
  mvn -B -q -f "$module/pom.xml" "-Dkafka.version=$KAFKA_VERSION" \
    org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
    -DincludeScope=runtime "-DoutputDirectory=$out" >"$log" 2>&1 || { tail -5 "$log" >&2; return 1; }
  # Maven itself only warns of a wrong sum, and a jar without one here must not be run either.
  if ! (export LC_ALL=C && cd "$out" && sha256sum -- *.jar) | diff "$module/jars.sha256" - >>"$log"; then
    fail "the jars of Kafka $KAFKA_VERSION are not those of modules/kafka/jars.sha256 (differences: $log)"
  fi
  say "Kafka $KAFKA_VERSION fetched"
}
