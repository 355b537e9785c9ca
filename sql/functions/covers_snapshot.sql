CREATE OR REPLACE FUNCTION :"schema".covers_snapshot(p_snapshot pg_snapshot, p_other pg_snapshot) RETURNS boolean
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Does a snapshot see whatever the other one sees? Null sees nothing. As outbox_core.standing.covers.
SELECT p_other IS NULL OR p_snapshot IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM pg_snapshot_xip(p_snapshot) AS i (id) WHERE pg_visible_in_snapshot(i.id, p_other))
    AND greatest(pg_snapshot_xmax(p_other)::text::numeric - pg_snapshot_xmax(p_snapshot)::text::numeric, 0)
        = (SELECT count(*) FROM pg_snapshot_xip(p_other) AS i (id) WHERE i.id >= pg_snapshot_xmax(p_snapshot))
$function$;
