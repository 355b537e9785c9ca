-- What people decided, the latest first.
SELECT a.id, a.act, a.processor_id, a.partition, a.from_transaction_id::text AS from_transaction_id, a.from_position,
       a.to_transaction_id::text AS to_transaction_id, a.to_position, a.reason, a.decided_by, a.session_role, a.acted_at
FROM {schema}.recorded_acts AS a
WHERE %(processor_id)s::text IS NULL OR a.processor_id = %(processor_id)s
ORDER BY a.id DESC
LIMIT %(limit)s
