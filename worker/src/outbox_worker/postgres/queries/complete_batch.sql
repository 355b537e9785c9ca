-- So many messages up to the pair are done; false: the batch is another consumer's.
SELECT {schema}.complete_batch(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(upto_transaction_id)s::xid8,
                               %(upto_position)s, %(messages)s)
