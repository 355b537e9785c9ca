"""What a batch writes: staging tables and Parquet files that appear with its checkpoint."""
