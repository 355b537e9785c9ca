-- A held message failed again.
SELECT {schema}.fail_held_message(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid,
    %(transaction_id)s::xid8, %(position)s, %(action)s, %(attempts)s, %(error_class)s, %(error)s, %(wait)s::interval,
    %(blocks)s)
