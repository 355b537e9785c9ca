-- name: fetch_place
-- Which server and database this is, on which timeline, as `current_timeline` says it where our schema is, and how far
-- its transaction ids are.
SELECT s.system_identifier::text, d.oid::text, d.datname,
       CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c)
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END AS timeline,
       pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM pg_control_system() AS s
CROSS JOIN pg_database AS d
WHERE d.datname = current_database()

-- name: begin_durable_read
-- Begins a transaction that only reads what another database will remember, and says on which timeline. Frozen, it must
-- not keep its locks.
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL synchronous_commit = local;
SET LOCAL idle_in_transaction_session_timeout = '60s';
SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int

-- name: end_durable_read
-- Ends it. What a snapshot sees as over is in the WAL before the snapshot is taken, and a crash takes back only what is not
-- flushed. Where something is not, a record of our own is written, and COMMIT waits until it and all before it is flushed.
SELECT CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()
       THEN pg_logical_emit_message(true, 'outbox', '') END;
COMMIT

-- name: fetch_source
-- Which other database the processor reads; no row: this one.
SELECT s.source, s.described
FROM {schema}.processor_sources AS s
WHERE s.processor_id = %(processor_id)s
