-- How the processor is divided, if it is, and what that changes to.
SELECT d.partition_count, d.key, d.next_count, d.line_transaction_id::text AS t, d.line_position,
       d.line_mark::text AS mark, d.line_snapshot::text AS snapshot
FROM {schema}.processor_partitions AS d
WHERE d.processor_id = %(processor_id)s
