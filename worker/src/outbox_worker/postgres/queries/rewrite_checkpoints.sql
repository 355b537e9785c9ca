-- Empties the table of checkpoints of dead rows if it is large.
SELECT {schema}.rewrite_checkpoints(%(bytes)s)
