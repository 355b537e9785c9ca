-- Heartbeat of a process with any number of partitions.
SELECT partition, epoch
FROM {schema}.renew_membership(%(processor_id)s, %(claim_uid)s, %(pod)s, %(token)s, %(lease)s)
