-- Write down which messages are tried, before they are.
SELECT {schema}.begin_suspect(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(transaction_id)s::xid8,
    %(position)s, %(generation)s, %(suspects)s)
