# shellcheck shell=bash
# Part "spark": a Java for the Spark sessions of tests; Spark itself comes with the Python environment.

setup_spark() {
  command -v java >/dev/null || debian openjdk-17-jre-headless
  say "spark: ready"
}
