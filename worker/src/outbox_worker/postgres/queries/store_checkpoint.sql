-- Store a pair under our epoch, in the transaction of the batch.
SELECT {schema}.store_processor_checkpoint(
    %(processor_id)s, %(partition)s, %(new_transaction_id)s::xid8, %(new_position)s,
    %(expected_transaction_id)s::xid8, %(expected_position)s, %(epoch)s, %(token)s::uuid)
