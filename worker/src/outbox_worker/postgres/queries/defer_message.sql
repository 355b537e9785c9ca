-- The message that failed leaves its batch; false: the batch is another consumer's.
SELECT {schema}.defer_message(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(action)s, %(wait)s, %(attempts)s,
                              %(transaction_id)s::xid8, %(position)s, %(message_id)s, %(message_type)s,
                              %(publication_id)s, %(partition_key)s, %(data)s::jsonb, %(metadata)s::jsonb,
                              %(scheduled)s, %(error_class)s, %(error)s)
