#!/bin/bash
# One image for both ends of Spark. Spark starts its executors' pods with the argument "executor" and SPARK_* variables;
# without it this is the pipeline's driver. Either way the started program takes this process's place and its signals.
set -euo pipefail

if [ "${1:-}" != executor ]; then
  exec python -m outbox_spark "$@"
fi

# Java options come numbered: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ...
java_options=()
for ((i = 0; ; i++)); do
  name=SPARK_JAVA_OPT_$i
  [ -n "${!name+set}" ] || break
  java_options+=("${!name}")
done
# As the driver's, in whose order the ready-made classes were written. Spark's folder for settings, which only executors'
# pods have, comes last: before the jars it would keep the classes from being mapped, as a class path of the user's does.
classpath=$(printf '%s:' "$SPARK_HOME"/jars/slf4j-api-*.jar)$SPARK_HOME/jars/*:${SPARK_CONF_DIR:-/opt/spark/conf}
[ -z "${SPARK_CLASSPATH:-}" ] || classpath=$SPARK_CLASSPATH:$classpath
[ -z "${SPARK_EXTRA_CLASSPATH:-}" ] || classpath=$SPARK_EXTRA_CLASSPATH:$classpath

exec "$JAVA_HOME/bin/java" "${java_options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
  -cp "$classpath" org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
  --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
  --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
  --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
