-- What is over and what is in progress, now; whether this is a standby, which cannot tell; and since when the server runs.
SELECT pg_current_snapshot()::text, pg_is_in_recovery(), pg_postmaster_start_time()
