CREATE OR REPLACE FUNCTION :"schema".rewind_processor_checkpoint(
    p_processor_id text, p_partition int, p_transaction_id xid8, p_position bigint, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Put the checkpoint where a person says, back or forward, and record it. 1 done; 4 refused: an owner is live.
-- Cursor Snapshot: the pair 0:POSITION means that every message from that position on is handled again, and none is lost.
DECLARE
    v_back pg_snapshot;
    v_stored processor_checkpoints;
    v_expires timestamptz;
BEGIN
    IF p_transaction_id IS NULL OR p_position IS NULL THEN
        RAISE EXCEPTION 'half a checkpoint: %:%', p_transaction_id, p_position
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Name both parts of the pair, transaction_id and position.';
    END IF;
    INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition) ON CONFLICT DO NOTHING;
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR UPDATE;
    IF v_expires > clock_timestamp() THEN
        RETURN 4;
    END IF;
    IF EXISTS (SELECT 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id
               AND p_partition NOT BETWEEN 0 AND d.partition_count - 1) THEN
        -- Its row would be in the way of a change to more partitions.
        RAISE EXCEPTION 'processor % has no partition %', p_processor_id, p_partition
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    FOR UPDATE;
    IF v_stored.cursor_kind = 'Snapshot' OR v_stored.processor_id IS NULL AND EXISTS (
           SELECT 1 FROM processor_conflicts f WHERE f.processor_id = p_processor_id AND f.partition = p_partition
           AND f.needs_person AND f.resolved_at IS NULL AND f.expected_transaction_id = '0' AND f.expected_position > 0) THEN
        IF p_transaction_id <> '0' THEN
            RAISE EXCEPTION 'the cursor of % is Snapshot: name 0:POSITION, the first position to handle again, not %:%',
                p_processor_id, p_transaction_id, p_position USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF v_stored.processor_id IS NULL AND p_position > 0
           AND EXISTS (SELECT 1 FROM processor_sources s WHERE s.processor_id = p_processor_id) THEN
            RAISE EXCEPTION 'the checkpoint of % is gone, and its messages are in another database: what is committed there is not '
                'known here', p_processor_id
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Name 0:0, and everything is handled again.';
        END IF;
        -- As outbox_core.window.Window.rewound: what is examined shrinks to what is below the position. Where the row is gone,
        -- what is committed by now is all there is to go by.
        v_back := CASE WHEN v_stored.processor_id IS NULL AND p_position <= 0 THEN NULL
                       WHEN v_stored.processor_id IS NULL THEN pg_current_snapshot()
                       WHEN p_position <= v_stored.window_position THEN v_stored.upper_snapshot
                       ELSE v_stored.lower_snapshot END;
        RETURN rewind_processor_window(p_processor_id, p_partition, NULL, v_back,
                                       CASE WHEN v_back IS NOT NULL THEN greatest(p_position, -9223372036854775807) - 1 END,
                                       p_reason, p_decided_by);
    END IF;
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_transaction_id = excluded.last_processed_transaction_id,
        last_processed_position = excluded.last_processed_position,
        stored_at = excluded.stored_at;
    PERFORM keep_checkpoint(p_processor_id, p_partition);
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, p_transaction_id, p_position, p_reason, p_decided_by);
    RETURN 1;
END
$function$;
