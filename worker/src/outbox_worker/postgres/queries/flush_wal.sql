-- Whether everything that was committed when this is asked first is on disk.
SELECT coalesce(%(lsn)s::pg_lsn, pg_current_wal_insert_lsn())::text,
       coalesce(pg_current_wal_flush_lsn() >= %(lsn)s::pg_lsn, false)
