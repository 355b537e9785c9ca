CREATE OR REPLACE FUNCTION :"schema".rewind_processor_window(
    p_processor_id text, p_partition int, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: put the checkpoint to a window that a person chose, back or forward, and record it. The counter goes
-- on, so that whoever expects the old one is told 2. 1 done; 4 refused: an owner is live.
DECLARE
    v_stored processor_checkpoints;
    v_expires timestamptz;
    v_counter bigint;
BEGIN
    IF (p_upper IS NULL) <> (p_position IS NULL) THEN
        RAISE EXCEPTION 'half a window: an upper snapshot goes with a position inside it'
            USING ERRCODE = 'null_value_not_allowed';
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
    IF v_stored.cursor_kind <> 'Snapshot' THEN
        RAISE EXCEPTION 'the checkpoint of % is a pair, cursor %: rewind_processor_checkpoint() moves it',
            p_processor_id, v_stored.cursor_kind USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A row that was deleted has its last counter in the conflict that says so.
    SELECT 1 + greatest(v_stored.last_processed_position, max(f.expected_position), 0) INTO v_counter
    FROM processor_conflicts f
    WHERE f.processor_id = p_processor_id AND f.partition = p_partition AND f.expected_transaction_id = '0';
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind, lower_snapshot,
         upper_snapshot, window_position)
    VALUES (p_processor_id, p_partition, '0', v_counter, 'Snapshot', p_lower, p_upper, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_position = excluded.last_processed_position,
        lower_snapshot = excluded.lower_snapshot,
        upper_snapshot = excluded.upper_snapshot,
        window_position = excluded.window_position,
        stored_at = excluded.stored_at;
    PERFORM keep_checkpoint(p_processor_id, p_partition);
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, '0', v_counter,
            format('%s (window %s .. %s after %s, before it %s .. %s after %s)', p_reason,
                   coalesce(p_lower::text, 'nothing'), coalesce(p_upper::text, '-'), coalesce(p_position::text, '-'),
                   coalesce(v_stored.lower_snapshot::text, 'nothing'), coalesce(v_stored.upper_snapshot::text, '-'),
                   coalesce(v_stored.window_position::text, '-')),
            p_decided_by);
    RETURN 1;
END
$function$;
