-- name: fetch_news
-- What this statement's snapshot sees and a former one did not, where that is little, with the snapshot; whether this is a
-- standby, where a snapshot does not say what is in progress; and whether nothing is, as in fetch_snapshot.
SELECT s.now::text, s.standby, pg_snapshot_xmin(s.now) = pg_snapshot_xmax(s.now) AND age(pg_snapshot_xmax(s.now)::xid) = 0,
       n.transaction_id, n.position, n.message_id, n.message_type, n.publication_id, n.partition_key,
       {payload}, n.scheduled, n.deliver_after
FROM (SELECT pg_current_snapshot() AS now, pg_is_in_recovery() AS standby) AS s
LEFT JOIN ({rows}) AS n ON true
ORDER BY n.position
LIMIT {size}
