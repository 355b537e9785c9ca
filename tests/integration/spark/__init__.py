"""Engine Spark: source, effects, driver and executors."""
