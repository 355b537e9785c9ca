-- Wait until the processor's transactions are over, and let none begin before ours ends: each of them holds this lock,
-- shared, under the epoch of its lease, before it locks anything else.
SELECT pg_advisory_xact_lock(
    hashtext('outbox ' || %(schema)s || ' ' || l.processor_id || ' ' || l.partition), (l.epoch & 2147483647)::int)
FROM {schema}.processor_leases AS l
WHERE l.processor_id = %(processor_id)s
ORDER BY l.partition
