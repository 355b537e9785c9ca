CREATE OR REPLACE FUNCTION :"schema".is_kept_for_snapshot(p_child text) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Would may_empty say no, because of a snapshot? Asked before the table is locked, so that nobody waits in vain.
SELECT EXISTS (SELECT 1 FROM emptyings e WHERE e.child = p_child AND holds_older_snapshot(e.seen_at, e.seen_id))
$function$;
