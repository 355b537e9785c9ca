CREATE OR REPLACE FUNCTION :"schema".cut_batch(
    p_processor_id text, p_lane int, p_frontier bigint, p_lower pg_snapshot, p_upper pg_snapshot,
    p_after_transaction_id xid8, p_after_position bigint, p_upto_transaction_id xid8, p_upto_position bigint,
    p_whole boolean, p_messages int, p_keys text[], p_delayed :"schema".competing_copies[],
    p_owner text, p_pod text, p_lease interval
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Hands out what was examined of a window, under the lock of lock_frontier(): the frontier moves on, and the batch begins. Without
-- messages only the frontier moves. p_whole: nothing is left of the window. p_delayed: what the batch leaves out, because its time has
-- not come: it is copied, and handed out when it has.
DECLARE
    v_queue text;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id FOR UPDATE;
    IF p_frontier IS DISTINCT FROM (
        SELECT f.id FROM competing_frontiers f
        WHERE f.processor_id = p_processor_id AND f.lane = p_lane ORDER BY f.id DESC LIMIT 1) THEN
        RAISE EXCEPTION 'the frontier of processor % has moved', p_processor_id USING ERRCODE = 'serialization_failure';
    END IF;
    IF p_whole THEN
        INSERT INTO competing_frontiers (id, processor_id, lane, lower_snapshot)
        VALUES (nextval('competing_frontier_ids'), p_processor_id, p_lane, p_upper);
    ELSE
        INSERT INTO competing_frontiers
            (id, processor_id, lane, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        VALUES (nextval('competing_frontier_ids'), p_processor_id, p_lane, p_lower, p_upper, p_upto_transaction_id, p_upto_position);
    END IF;
    IF p_keys IS NOT NULL AND v_queue IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I WHERE unique_key = ANY ($1)', 'queue_' || v_queue || '_keys') USING p_keys;
    END IF;
    IF cardinality(p_delayed) > 0 THEN
        INSERT INTO competing_copies SELECT d.* FROM unnest(p_delayed) AS d;
        INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, due_at)
        SELECT d.processor_id, d.transaction_id, d.position, d.message_id, coalesce(d.deliver_after, clock_timestamp())
        FROM unnest(p_delayed) AS d;
    END IF;
    RETURN QUERY
        INSERT INTO competing_batches
            (id, processor_id, lane, owner, pod, expires_at, lower_snapshot, upper_snapshot, after_transaction_id,
             after_position, upto_transaction_id, upto_position, messages, aside)
        SELECT nextval('competing_batch_ids'), p_processor_id, p_lane, p_owner, p_pod, clock_timestamp() + p_lease, p_lower, p_upper,
               p_after_transaction_id, p_after_position, p_upto_transaction_id, p_upto_position, p_messages,
               (SELECT array_agg(d.position) FROM unnest(p_delayed) AS d)
        WHERE p_messages > 0
        RETURNING *;
END
$function$;
