-- Ends it. What a snapshot sees as over is in the WAL before the snapshot is taken, and a crash takes back only what is not
-- flushed. Where something is not, a record of our own is written, and COMMIT waits until it and all before it is flushed.
SELECT CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()
       THEN pg_logical_emit_message(true, 'outbox', '') END;
COMMIT
