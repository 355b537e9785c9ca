-- What is up to the pair is behind, and what failed of it leaves the batch; false: the batch is another consumer's; null: as in
-- complete_batch.
SELECT CASE WHEN coalesce({schema}.server_run() = %(server_run)s::uuid, true) THEN
       {schema}.defer_messages(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(upto_transaction_id)s::xid8,
                               %(upto_position)s, %(messages)s, %(failed)s::json) END
