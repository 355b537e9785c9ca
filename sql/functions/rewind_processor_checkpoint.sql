CREATE OR REPLACE FUNCTION :"schema".rewind_processor_checkpoint(
    p_processor_id text, p_partition int, p_transaction_id xid8, p_position bigint, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Put the checkpoint where a person says, back or forward, and record it. 1 done; 4 refused: an owner is live.
DECLARE
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
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    FOR UPDATE;
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_transaction_id = excluded.last_processed_transaction_id,
        last_processed_position = excluded.last_processed_position,
        stored_at = excluded.stored_at;
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, p_transaction_id, p_position, p_reason, p_decided_by);
    RETURN 1;
END
$function$;
