-- Leave, and give everything back.
SELECT {schema}.end_membership(%(processor_id)s, %(token)s)
