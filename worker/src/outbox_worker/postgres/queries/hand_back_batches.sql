-- What this consumer has not finished is anybody's.
SELECT {schema}.hand_back_batches(%(processor_id)s, %(owner)s)
