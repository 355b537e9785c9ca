-- Makes a queue's table, if it is missing.
SELECT {schema}.create_queue(%(queue)s)
