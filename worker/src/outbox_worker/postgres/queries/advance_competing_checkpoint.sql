-- Stores the pair up to which everything is done.
SELECT {schema}.advance_competing_checkpoint(%(processor_id)s)
