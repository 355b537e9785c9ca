CREATE OR REPLACE FUNCTION :"schema".has_examined(p_one :"schema".processor_checkpoints, p_other :"schema".processor_checkpoints)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Has one checkpoint examined whatever the other one has? A pair (x, p) is the window from x:x: to x+1:x+1: at p. A pair
-- can only be said to cover a window as a whole.
DECLARE
    v_x numeric := p_other.last_processed_transaction_id::text::numeric;
    v_lower pg_snapshot := p_other.lower_snapshot;
    v_upper pg_snapshot := p_other.upper_snapshot;
    v_position bigint := p_other.window_position;
BEGIN
    IF p_one.cursor_kind <> 'Snapshot' AND p_other.cursor_kind <> 'Snapshot' THEN
        RETURN (p_one.last_processed_transaction_id, p_one.last_processed_position)
            >= (p_other.last_processed_transaction_id, p_other.last_processed_position);
    ELSIF p_one.cursor_kind <> 'Snapshot' THEN
        RETURN coalesce(
            (p_one.last_processed_transaction_id::text::numeric, p_one.last_processed_position)
            >= (pg_snapshot_xmax(coalesce(v_upper, v_lower))::text::numeric - 1, 9223372036854775807), true);
    ELSIF p_other.cursor_kind <> 'Snapshot' AND v_x > 0 THEN
        v_lower := format('%s:%s:', v_x, v_x)::pg_snapshot;
        v_upper := format('%s:%s:', v_x + 1, v_x + 1)::pg_snapshot;
        v_position := p_other.last_processed_position;
    END IF;
    RETURN covers_snapshot(p_one.lower_snapshot, coalesce(v_upper, v_lower))
        OR coalesce(p_one.window_position >= v_position, false)
           AND covers_snapshot(p_one.lower_snapshot, v_lower) AND covers_snapshot(p_one.upper_snapshot, v_upper);
END
$function$;
