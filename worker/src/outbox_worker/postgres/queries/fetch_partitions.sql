-- How the processor is divided, if it is.
SELECT d.partition_count, d.key
FROM {schema}.processor_partitions AS d
WHERE d.processor_id = %(processor_id)s
