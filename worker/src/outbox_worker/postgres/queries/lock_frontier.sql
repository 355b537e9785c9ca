-- Opens the transaction in which a batch is handed out. A process that is frozen in it does not keep the lock.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT set_config('idle_in_transaction_session_timeout', '2000', true), set_config('statement_timeout', '30000', true);
SELECT f.lane, f.id, f.lower_snapshot::text, f.upper_snapshot::text, f.after_transaction_id::text, f.after_position,
       f.now_snapshot::text
FROM {schema}.lock_frontier({processor_id}, {claim_uid}) AS f
