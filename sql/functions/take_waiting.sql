CREATE OR REPLACE FUNCTION :"schema".take_waiting(
    p_processor_id text, p_claim_uid text, p_owner text, p_pod text, p_lease interval, p_limit int, p_failed boolean
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Work that is there already. p_failed: messages that failed before and whose next attempt is due, or a batch of such that was
-- handed back or whose lease is over; else a batch of others of which that is true, or messages whose time has come. Whoever
-- dies over a batch leaves it to be handled in smaller pieces, so that in the end the message that kills is alone and is counted.
DECLARE
    v_batch competing_batches;
    v_transaction_ids xid8[];
    v_positions bigint[];
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN;
    END IF;
    SELECT b.* INTO v_batch FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND (b.owner IS NULL OR b.expires_at <= clock_timestamp())
      AND b.failed = p_failed
    ORDER BY b.id LIMIT 1
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN QUERY
            UPDATE competing_batches b
            SET owner = p_owner, pod = p_pod, attempt = b.attempt + 1, expires_at = clock_timestamp() + p_lease,
                deaths = CASE WHEN b.owner IS NOT NULL AND b.piece = 1 THEN b.deaths + 1 ELSE b.deaths END,
                piece = CASE WHEN b.owner IS NULL THEN b.piece
                             ELSE greatest(1, coalesce(b.piece, b.messages) / 2) END
            WHERE b.processor_id = p_processor_id AND b.id = v_batch.id
            RETURNING b.*;
        RETURN;
    END IF;
    -- Two statements: each has an index of its own.
    IF p_failed THEN
        SELECT array_agg(d.transaction_id), array_agg(d.position) INTO v_transaction_ids, v_positions FROM (
            SELECT w.transaction_id, w.position FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= clock_timestamp() AND w.error_class IS NOT NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    ELSE
        SELECT array_agg(d.transaction_id), array_agg(d.position) INTO v_transaction_ids, v_positions FROM (
            SELECT w.transaction_id, w.position FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= clock_timestamp() AND w.error_class IS NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    END IF;
    IF v_positions IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
        WITH due AS (
            DELETE FROM competing_retries r USING unnest(v_transaction_ids, v_positions) AS d (t, p)
            WHERE r.processor_id = p_processor_id AND r.transaction_id = d.t AND r.position = d.p
            RETURNING r.transaction_id AS t, r.position AS p, r.attempts AS a
        )
        INSERT INTO competing_batches
            (id, processor_id, lane, owner, pod, expires_at, after_transaction_id, after_position,
             upto_transaction_id, upto_position, messages, transaction_ids, positions, attempts, failed)
        SELECT nextval('competing_batch_ids'), p_processor_id, 0, p_owner, p_pod, clock_timestamp() + p_lease, '0', 0,
               (array_agg(t ORDER BY t DESC, p DESC))[1], (array_agg(p ORDER BY t DESC, p DESC))[1], count(*),
               array_agg(t ORDER BY t, p), array_agg(p ORDER BY t, p), array_agg(a ORDER BY t, p), p_failed
        FROM due HAVING count(*) > 0
        RETURNING *;
END
$function$;
