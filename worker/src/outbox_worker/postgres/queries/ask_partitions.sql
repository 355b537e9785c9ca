-- Say into how many partitions the resource wants the processor divided; learn how it is.
SELECT partition_count, key, next_count
FROM {schema}.ask_partitions(%(processor_id)s, %(claim_uid)s, %(generation)s, %(count)s, %(key)s, %(asked_by)s)
