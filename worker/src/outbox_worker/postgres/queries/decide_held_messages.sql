-- Try held messages again whose attempts ran out, or drop them.
SELECT {schema}.decide_held_messages(%(processor_id)s, %(partition)s, %(places)s::bigint[], %(drop)s, %(reason)s,
    %(decided_by)s)
