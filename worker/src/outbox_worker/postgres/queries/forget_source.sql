-- A user's decision: the next resource that claims writes down what it reads.
SELECT {schema}.forget_processor_source(%(processor_id)s, %(reason)s, %(decided_by)s)
