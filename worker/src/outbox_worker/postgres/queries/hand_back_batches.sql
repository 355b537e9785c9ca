-- What this consumer has not finished is free for every consumer.
SELECT {schema}.hand_back_batches(%(processor_id)s, %(owner)s)
