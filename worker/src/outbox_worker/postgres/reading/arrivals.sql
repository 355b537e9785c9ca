-- name: look_for_arrivals
-- The oldest transaction that may still be open, whether none is, the transaction of the newest message, the server's run,
-- whether the number of partitions is to change, and the slots of the messages since a transaction: of one snapshot.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text,
       pg_snapshot_xmin(pg_current_snapshot()) = pg_snapshot_xmax(pg_current_snapshot())
       AND age(pg_snapshot_xmax(pg_current_snapshot())::xid) = 0,
       ({newest}), {schema}.server_run()::text,
       EXISTS (SELECT FROM {schema}.processor_partitions AS d
               WHERE d.processor_id = {processor_id} AND d.next_count IS NOT NULL),
       {slots}

-- name: name_slots
-- The slots of some messages; null where there are more than a few.
(SELECT CASE WHEN count(*) <= {few} THEN coalesce(array_agg(DISTINCT s.slot), '{{}}') END FROM ({rows}) AS s)
