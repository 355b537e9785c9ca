-- So many messages up to the pair are done; false: the batch is another consumer's; null: nothing was done, for the
-- server recovered from a crash, and may have lost how far the batch was.
SELECT CASE WHEN coalesce({schema}.server_run() = %(server_run)s::uuid, true) THEN
       {schema}.complete_batch(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(upto_transaction_id)s::xid8,
                               %(upto_position)s, %(messages)s) END
