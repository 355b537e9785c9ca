-- Is there such a queue?
SELECT 1 FROM {schema}.queues WHERE queue = %(queue)s
