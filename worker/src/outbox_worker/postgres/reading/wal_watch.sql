-- name: await_wal
-- Where the log is, as soon as the server flushed WAL beyond the place, or wrote some that is not flushed a millisecond
-- later, or the time is over; at once where a pooler stands between, for then the session is another one than the client
-- knows. Most commits are visible once they are flushed, and a look before would be in vain; one that does not wait for
-- that is visible once it is written. It takes no lock and no transaction id, and needs no privilege.
SELECT pg_backend_pid(), pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text
FROM generate_series(0, {steps}) AS step,
     LATERAL (
         SELECT CASE WHEN step > 0 THEN pg_sleep({seconds}) END,
                pg_current_wal_insert_lsn() AS inserted,
                pg_current_wal_flush_lsn() AS flushed
     ) AS log,
     LATERAL (
         SELECT CASE WHEN log.inserted <> {inserted}::pg_lsn AND log.flushed = {flushed}::pg_lsn THEN pg_sleep(0.0005) END
         OFFSET 0
     ) AS settled
WHERE pg_backend_pid() <> {pid}
   OR log.inserted IS DISTINCT FROM {inserted}::pg_lsn
   OR log.flushed IS DISTINCT FROM {flushed}::pg_lsn
   OR clock_timestamp() >= statement_timestamp() + {longest}::float8 * interval '1 s'
LIMIT 1

-- name: fetch_log_threshold
-- Milliseconds from which a statement is logged; 0: each, -1: none.
SELECT setting::int FROM pg_settings WHERE name = 'log_min_duration_statement'

-- name: fetch_wal_place
-- Where the log is, and by whom this was said: a pooler may lend another session, of another server. No row: a standby.
SELECT pg_backend_pid(), pg_current_wal_insert_lsn()::text WHERE NOT pg_is_in_recovery()
