-- name: fetch_news
-- What this statement's snapshot sees and a former one did not, where that is little, with the snapshot; and whether this is a
-- standby, where a snapshot does not say what is in progress.
SELECT s.now, s.standby, n.transaction_id, n.position, n.message_id, n.message_type, n.publication_id, n.partition_key,
       {payload}, n.scheduled, n.deliver_after
FROM (SELECT pg_current_snapshot()::text AS now, pg_is_in_recovery() AS standby) AS s
LEFT JOIN ({rows}) AS n ON true
ORDER BY n.position
