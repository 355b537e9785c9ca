-- Held messages are handled, in this transaction.
SELECT {schema}.settle_held_messages(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid,
    %(transaction_ids)s::xid8[], %(positions)s::bigint[])
