-- Delayed messages of a queue whose time has come become available; of those that failed before, or of the others.
SELECT {schema}.promote_waiting(%(queue)s, %(limit)s, %(failed)s)
