-- Live leases of the processor.
SELECT l.partition, l.token, l.epoch, l.pod
FROM {schema}.processor_leases AS l
WHERE l.processor_id = %(processor_id)s AND l.expires_at > clock_timestamp()
ORDER BY l.partition
