CREATE OR REPLACE FUNCTION :"schema".resolve_conflict(
    p_conflict_id bigint, p_action text, p_transaction_id xid8, p_position bigint, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A person's decision: 'Accept' goes on from the stored pair, which must be the one that the person saw; 'Rewind' stores
-- the pair given. 1 done, 0 was resolved before, 2 the stored pair is not the one named, 3 no such open conflict, 4 an
-- owner is live. Closes every open conflict of that processor and partition.
DECLARE
    v_conflict processor_conflicts;
    v_stored processor_checkpoints;
BEGIN
    IF p_action IS NULL OR p_action NOT IN ('Accept', 'Rewind') THEN
        RAISE EXCEPTION 'resolve_conflict: % is neither Accept nor Rewind', p_action
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT f.* INTO v_conflict FROM processor_conflicts f WHERE f.id = p_conflict_id FOR UPDATE;
    IF NOT FOUND OR NOT v_conflict.needs_person THEN
        RETURN 3;
    ELSIF v_conflict.resolved_at IS NOT NULL THEN
        RETURN 0;
    END IF;
    IF p_action = 'Rewind' THEN
        IF rewind_processor_checkpoint(v_conflict.processor_id, v_conflict.partition, p_transaction_id, p_position,
                                       format('conflict %s', p_conflict_id), p_decided_by) <> 1 THEN
            RETURN 4;
        END IF;
    ELSE
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = v_conflict.processor_id AND c.partition = v_conflict.partition
        FOR UPDATE;
        IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
           IS DISTINCT FROM (p_transaction_id, p_position) OR v_stored.processor_id IS NULL THEN
            RETURN 2;
        END IF;
        PERFORM keep_checkpoint(v_conflict.processor_id, v_conflict.partition);
        INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                                   to_position, reason, decided_by)
        VALUES ('Accept', v_conflict.processor_id, v_conflict.partition, v_conflict.expected_transaction_id,
                v_conflict.expected_position, p_transaction_id, p_position,
                format('conflict %s', p_conflict_id), p_decided_by);
    END IF;
    UPDATE processor_conflicts f
    SET resolved_at = clock_timestamp(), resolution = p_action, decided_by = p_decided_by
    WHERE f.processor_id = v_conflict.processor_id AND f.partition = v_conflict.partition
      AND f.needs_person AND f.resolved_at IS NULL;
    RETURN 1;
END
$function$;
