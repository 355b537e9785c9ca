-- name: await_wal
-- Where the log is, as soon as the server wrote or flushed WAL beyond the two places, or the time is over; at once where a
-- pooler stands between, for then the session is another one than the client knows. It takes no lock and no transaction
-- id, and needs no privilege.
SELECT pg_backend_pid(), log.inserted::text, log.flushed::text
FROM generate_series(0, {steps}) AS step,
     LATERAL (
         SELECT CASE WHEN step > 0 THEN pg_sleep({seconds}) END,
                pg_current_wal_insert_lsn() AS inserted,
                pg_current_wal_flush_lsn() AS flushed
     ) AS log
WHERE pg_backend_pid() <> {pid}
   OR log.inserted IS DISTINCT FROM {inserted}::pg_lsn
   OR log.flushed IS DISTINCT FROM {flushed}::pg_lsn
   OR clock_timestamp() >= statement_timestamp() + {longest} * interval '1 s'
LIMIT 1

-- name: fetch_log_threshold
-- Milliseconds from which a statement is logged; 0: each, -1: none.
SELECT setting::int FROM pg_settings WHERE name = 'log_min_duration_statement'
