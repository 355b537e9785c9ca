-- A range of the outbox, to be looked at in another database.
SELECT coalesce(json_agg(r), '[]')::text FROM ({rows}) AS r
