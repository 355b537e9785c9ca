CREATE OR REPLACE FUNCTION :"schema".lock_frontier(p_processor_id text, p_claim_uid text) RETURNS TABLE (
    lane smallint, id bigint, lower_snapshot pg_snapshot, upper_snapshot pg_snapshot,
    after_transaction_id xid8, after_position bigint, now_snapshot pg_snapshot
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The right to hand out the next batch, to the end of the caller's transaction. No row: somebody else is at it, or the claim is not
-- this resource's.
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM competing_processors p
    WHERE p.processor_id = p_processor_id
      AND EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- A statement of its own: its snapshot is younger than the lock.
    RETURN QUERY
        SELECT n.lane, f.id, f.lower_snapshot, f.upper_snapshot, f.after_transaction_id, f.after_position,
               pg_current_snapshot()
        FROM competing_processors p
        CROSS JOIN LATERAL generate_series(0, CASE WHEN p.queue IS NULL THEN 0 ELSE 9 END) AS s (lane)
        CROSS JOIN LATERAL (SELECT s.lane::smallint) AS n (lane)
        CROSS JOIN LATERAL (
            SELECT l.* FROM competing_frontiers l
            WHERE l.processor_id = p_processor_id AND l.lane = n.lane
            ORDER BY l.id DESC LIMIT 1) AS f
        WHERE p.processor_id = p_processor_id;
END
$function$;
