CREATE OR REPLACE FUNCTION :"schema".current_timeline() RETURNS int
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The server's timeline: each promotion of a standby and each recovery to a point in time begins a new one. The control file
-- learns of it only with the next checkpoint; some hosted servers show nothing else.
BEGIN
    IF NOT pg_is_in_recovery() THEN
        RETURN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int;
    END IF;
    RETURN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c);
EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
    RETURN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c);
END
$function$;
