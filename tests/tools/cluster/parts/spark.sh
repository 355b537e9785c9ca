# shellcheck shell=bash
# Part "spark": a Java for the Spark sessions of tests; Spark itself comes with the Python environment. A copy of it in
# $OUTBOX_CACHE/spark/VERSION-JAVA, whose path is the same for every checkout, has its classes ready to be mapped.

setup_spark() {
  command -v java >/dev/null || debian openjdk-17-jre-headless
  local python=$CHECKOUT/.venv/bin/python key
  [ -x "$python" ] || setup_python
  key=$("$python" -c 'import pyspark; print(pyspark.__version__)')-$(java -version 2>&1 | sed -n 's/.*version "\(.*\)".*/\1/p')
  key=$key-$(hash_of "$CHECKOUT/worker/src/outbox_spark/classes.py" "${BASH_SOURCE[0]}")
  with_lock "$OUTBOX_CACHE/locks/spark" cached "spark/$key" copy_spark
  with_lock "$OUTBOX_CACHE/locks/spark" telling "Spark's classes" write_spark_classes "$OUTBOX_CACHE/spark/$key"
  ln -sfn "$OUTBOX_CACHE/spark/$key" "$CHECKOUT/.venv/spark"
  say "spark: ready"
}

copy_spark() {
  cp -rL --preserve=timestamps "$("$CHECKOUT/.venv/bin/python" -c 'import pyspark; print(*pyspark.__path__)')/." "$1"
  # As in the image (worker/Dockerfile.spark): Python workers import the installed, compiled package.
  rm "$1"/python/lib/pyspark.zip "$1"/python/lib/py4j-*.zip
}

# In its final place: the classes go with the path of their jars.
write_spark_classes() {
  local home=$1 log=$OUTBOX_CACHE/logs/spark-classes.log
  [ ! -e "$home/classes.jsa" ] || return 0
  mkdir -p "$(dirname "$log")"
  rm -f "$home/classes.part"
  (cd "$CHECKOUT" && SPARK_HOME=$home .venv/bin/python -P worker/src/outbox_spark/classes.py "$home/classes.part") >"$log" 2>&1 ||
    { tail -5 "$log" >&2; return 1; }
  mv "$home/classes.part" "$home/classes.jsa"
  # Half a gigabyte each.
  keep_newest "$OUTBOX_CACHE/spark" 2
  say "spark's classes written"
}
