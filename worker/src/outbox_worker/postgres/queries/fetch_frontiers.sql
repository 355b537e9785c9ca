-- How far each lane was handed out, and the snapshot of now.
SELECT DISTINCT ON (f.lane) f.lane, f.id, f.lower_snapshot::text, f.upper_snapshot::text, f.after_transaction_id::text,
       f.after_position, pg_current_snapshot()::text
FROM {schema}.competing_frontiers AS f WHERE f.processor_id = %(processor_id)s
ORDER BY f.lane, f.id DESC
