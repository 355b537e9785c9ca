-- No process may become an owner before this transaction ends; which one is already?
SELECT l.processor_id, l.partition, l.pod, l.expires_at > clock_timestamp()
FROM {schema}.processor_leases AS l
ORDER BY l.processor_id, l.partition
FOR UPDATE
