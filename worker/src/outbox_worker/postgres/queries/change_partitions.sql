-- Change the number of partitions if all have stopped at the line.
SELECT {schema}.change_partitions(%(processor_id)s, %(claim_uid)s)
