CREATE OR REPLACE FUNCTION :"schema".begin_competing(
    p_processor_id text, p_claim_uid text, p_queue text,
    p_lower pg_snapshot, p_after_transaction_id xid8, p_after_position bigint
) RETURNS TABLE (owned boolean, queue text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first consumer writes down where the processor starts; everybody else learns what was written. owned false: the claim is not this
-- resource's, or the processor has checkpoints of another mode.
#variable_conflict use_column
BEGIN
    owned := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid);
    begun := false;
    IF owned THEN
        INSERT INTO competing_processors (processor_id, queue) VALUES (p_processor_id, p_queue) ON CONFLICT DO NOTHING;
        begun := FOUND;
    END IF;
    IF begun THEN
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, 0, p_after_transaction_id, p_after_position) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'processor % has a checkpoint of another mode', p_processor_id
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Use another processorId.';
        END IF;
        INSERT INTO competing_frontiers
            (id, processor_id, lane, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        SELECT nextval('competing_frontier_ids'), p_processor_id, n, p_lower, pg_current_snapshot(), p_after_transaction_id, p_after_position
        FROM generate_series(0, CASE WHEN p_queue IS NULL THEN 0 ELSE 9 END) AS n;
    END IF;
    SELECT p.queue INTO queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;
