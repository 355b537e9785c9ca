-- The checkpoint of a queue moves on although not every priority is used.

CREATE OR REPLACE FUNCTION :"schema".advance_competing_checkpoint(p_processor_id text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Stores the pair up to which everything is done: before the oldest batch that is not, the oldest message that waits for another
-- attempt, and what was not handed out. Of what it passed over there is a copy. It never moves back.
DECLARE
    v_queue text;
    v_idle smallint[] := '{}';
    v_seen bigint;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    IF v_queue IS NOT NULL THEN
        -- The frontier of a priority of which nothing waits stays where it last had a message, or at the processor's start. What is
        -- stored of it from now on comes behind every frontier that there is now: one statement, so that now is the same for all.
        EXECUTE format($sql$
            SELECT coalesce(array_agg(l.lane) FILTER (WHERE l.upper_snapshot IS NULL AND head.position IS NULL), '{}'),
                   max(pg_snapshot_xmin(coalesce(l.upper_snapshot, l.lower_snapshot))::text::bigint)
            FROM (
                SELECT DISTINCT ON (f.lane) f.* FROM competing_frontiers f
                WHERE f.processor_id = $1 ORDER BY f.lane, f.id DESC) AS l
            LEFT JOIN LATERAL (
                (SELECT o.position FROM %1$I o
                 WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')
                   AND o.priority = l.lane AND o.transaction_id >= pg_snapshot_xmax(l.lower_snapshot)
                 ORDER BY o.transaction_id, o.position LIMIT 1)
                UNION ALL
                (SELECT late.position FROM pg_snapshot_xip(l.lower_snapshot) AS x (id) CROSS JOIN LATERAL (
                     SELECT o.position FROM %1$I o
                     WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')
                       AND o.priority = l.lane AND o.transaction_id = x.id
                     ORDER BY o.position LIMIT 1) AS late LIMIT 1)
            ) AS head ON true$sql$, 'queue_' || v_queue)
        INTO v_idle, v_seen USING p_processor_id;
    END IF;
    WITH lanes AS (
        SELECT DISTINCT ON (f.lane) f.* FROM competing_frontiers f
        WHERE f.processor_id = p_processor_id AND f.lane <> ALL (v_idle) ORDER BY f.lane, f.id DESC
    ), bounds AS (
        SELECT coalesce(l.upper_snapshot, l.lower_snapshot) AS seen, NULL::xid8 AS t, NULL::bigint AS p FROM lanes l
        UNION ALL
        SELECT l.lower_snapshot, l.after_transaction_id, l.after_position FROM lanes l WHERE l.upper_snapshot IS NOT NULL
        UNION ALL
        SELECT b.lower_snapshot, b.after_transaction_id, b.after_position
        FROM competing_batches b WHERE b.processor_id = p_processor_id AND b.positions IS NULL
        UNION ALL
        SELECT NULL, w.t, w.p - 1 FROM (
            SELECT l.t, l.p FROM competing_batches b CROSS JOIN LATERAL unnest(b.transaction_ids, b.positions) AS l (t, p)
            WHERE b.processor_id = p_processor_id AND b.positions IS NOT NULL
            UNION ALL
            SELECT r.transaction_id, r.position FROM competing_retries r WHERE r.processor_id = p_processor_id
        ) AS w
        WHERE NOT EXISTS (SELECT 1 FROM competing_copies c WHERE c.processor_id = p_processor_id
                          AND c.transaction_id = w.t AND c.position = w.p)
    ), pairs AS (
        SELECT (pg_snapshot_xmin(b.seen)::text::bigint - 1)::text::xid8 AS t, 9223372036854775807 AS p
        FROM bounds b WHERE b.t IS NULL OR b.t = '0'
        UNION ALL
        SELECT b.t, b.p FROM bounds b WHERE b.t <> '0'
        UNION ALL
        SELECT (v_seen - 1)::text::xid8, 9223372036854775807 WHERE v_seen IS NOT NULL
    ), lowest AS (
        SELECT t, p FROM pairs ORDER BY t, p LIMIT 1
    )
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = lowest.t, last_processed_position = lowest.p, stored_at = clock_timestamp()
    FROM lowest
    WHERE c.processor_id = p_processor_id AND c.partition = 0
      AND (c.last_processed_transaction_id, c.last_processed_position) < (lowest.t, lowest.p);
END
$function$;
