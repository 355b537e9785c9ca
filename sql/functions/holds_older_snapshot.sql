CREATE OR REPLACE FUNCTION :"schema".holds_older_snapshot(
    p_seen_at timestamptz, p_seen_id bigint, p_settled interval DEFAULT '2 minutes') RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a dump of this database that holds a snapshot from before p_seen_at still be without its locks? p_seen_id: no transaction
-- up to it was open to begin then. Young is a session that began its transaction since, or whose snapshot has all those
-- behind it; of a standby, a replication slot, or a session that we may not look into, only the latter is known. A dump
-- locks every table right after it took its snapshot, and a lock stops TRUNCATE. So a session that has been in its
-- transaction for p_settled is no dump that has still to lock, unless it is called pg_dump.
SELECT EXISTS (
    SELECT 1 FROM pg_stat_activity a
    WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
      AND (a.datid IS NULL OR a.datname = current_database())
      AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
      AND age(a.backend_xmin) > age(p_seen_id::text::xid8::xid) AND coalesce(a.xact_start <= p_seen_at, true)
      AND (a.application_name LIKE 'pg_dump%' OR a.xact_start IS NULL OR a.xact_start > clock_timestamp() - p_settled))
    OR EXISTS (SELECT 1 FROM pg_replication_slots s WHERE age(s.xmin) > age(p_seen_id::text::xid8::xid))
$function$;
