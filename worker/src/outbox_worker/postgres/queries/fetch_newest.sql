-- What is over and what is in progress, now; whether this is a standby, which cannot tell; and the highest transaction id
-- of a message that this very snapshot sees.
SELECT pg_current_snapshot()::text, pg_is_in_recovery(), ({newest})
