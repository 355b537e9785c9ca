-- Which processor replaces which, with both checkpoints; of a divided one the furthest.
SELECT r.processor_id, r.of_processor_id, r.begun_at, r.swapped_at, r.transaction_id::text AS t, r.position,
       n.t AS new_t, n.p AS new_p, o.t AS old_t, o.p AS old_p
FROM {schema}.processor_rebuilds AS r
LEFT JOIN LATERAL (
    SELECT c.last_processed_transaction_id::text AS t, c.last_processed_position AS p
    FROM {schema}.processor_checkpoints AS c WHERE c.processor_id = r.processor_id
    ORDER BY c.last_processed_transaction_id DESC, c.last_processed_position DESC LIMIT 1) AS n ON true
LEFT JOIN LATERAL (
    SELECT c.last_processed_transaction_id::text AS t, c.last_processed_position AS p
    FROM {schema}.processor_checkpoints AS c WHERE c.processor_id = r.of_processor_id
    ORDER BY c.last_processed_transaction_id DESC, c.last_processed_position DESC LIMIT 1) AS o ON true
WHERE %(processor_id)s::text IS NULL OR r.processor_id = %(processor_id)s OR r.of_processor_id = %(processor_id)s
ORDER BY r.begun_at, r.processor_id
