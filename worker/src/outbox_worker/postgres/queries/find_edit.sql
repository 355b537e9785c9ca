-- Whether the checkpoint was changed or deleted past the contract's functions: what they stored, and what is there.
SELECT kept_transaction_id::text, kept_position, transaction_id::text AS t, position
FROM {schema}.find_edit(%(processor_id)s, %(partition)s)
