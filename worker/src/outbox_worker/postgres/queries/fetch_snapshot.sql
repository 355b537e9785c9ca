-- What is over and what is in progress, now; and whether this is a standby, which cannot tell.
SELECT pg_current_snapshot()::text, pg_is_in_recovery()
