-- Heartbeat of a process with any number of partitions.
SELECT m.partition, m.epoch
FROM {schema}.renew_membership(%(processor_id)s, %(claim_uid)s, %(pod)s, %(token)s, %(lease)s) AS m
