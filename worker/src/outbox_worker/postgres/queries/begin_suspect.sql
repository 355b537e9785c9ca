-- Write down which message is tried, before it is.
SELECT {schema}.begin_suspect(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(transaction_id)s::xid8,
    %(position)s, %(generation)s)
