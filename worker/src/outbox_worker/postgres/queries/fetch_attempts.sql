-- How often messages of a queue have failed before, of those that have.
SELECT a.transaction_id::text, a.position, a.attempts FROM ({rows}) AS a WHERE a.attempts > 0
