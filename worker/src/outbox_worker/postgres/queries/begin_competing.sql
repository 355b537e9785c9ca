-- Joins a processor in mode Competing; the first consumer writes down where it starts.
SELECT owned, queue, begun
FROM {schema}.begin_competing(%(processor_id)s, %(claim_uid)s, %(queue)s, %(lower)s::pg_snapshot,
                              %(after_transaction_id)s::xid8, %(after_position)s)
