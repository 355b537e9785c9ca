-- A batch that was handed back, or whose lease is over, or messages whose time has come; of those that failed before, or of the others.
SELECT b.id, b.lane, b.attempt, b.lower_snapshot::text, b.upper_snapshot::text, b.after_transaction_id::text,
       b.after_position, b.upto_transaction_id::text, b.upto_position, b.messages, b.piece, b.deaths,
       b.transaction_ids::text[], b.positions, b.attempts, b.aside
FROM {schema}.take_waiting(%(processor_id)s, %(claim_uid)s, %(owner)s, %(pod)s, %(lease)s, %(limit)s, %(failed)s) AS b
