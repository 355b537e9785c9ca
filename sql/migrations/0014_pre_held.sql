-- A held message that fails may block its key where its dead letter does not.

CREATE OR REPLACE FUNCTION :"schema".fail_held_message(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A held message failed again: try it later (Hold; without a wait: when a person says so), keep it as a dead letter, or
-- skip it for good. What waits behind a dead letter of its key goes on waiting, if that blocks. -1: not the owner.
-- 0: it is held no more.
DECLARE
    v_held held_messages;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    UPDATE held_messages h
    SET attempts = p_attempts, error_class = p_error_class, error = p_error, blocks = h.blocks OR p_blocks,
        next_attempt_at = coalesce(clock_timestamp() + p_wait, 'infinity')
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = p_transaction_id AND h.position = p_position
    RETURNING h.* INTO v_held;
    IF NOT FOUND THEN
        RETURN 0;
    ELSIF p_action = 'Hold' THEN
        RETURN 1;
    END IF;
    DELETE FROM held_messages h
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = p_transaction_id AND h.position = p_position;
    IF p_action = 'DeadLetter' THEN
        INSERT INTO dead_letters (processor_id, partition, key, place, transaction_id, position, message_id,
                                  message_type, publication_id, partition_key, data, metadata, scheduled, attempts,
                                  error_class, error, blocks)
        VALUES (p_processor_id, p_partition, v_held.key, v_held.place, v_held.transaction_id, v_held.position,
                v_held.message_id, v_held.message_type, v_held.publication_id, v_held.partition_key, v_held.data,
                v_held.metadata, v_held.scheduled, p_attempts, p_error_class, p_error, p_blocks);
    ELSE
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        VALUES ('Skip', p_processor_id, p_partition, p_transaction_id, p_position,
                format('message %s of type %s, key %s, after %s attempts: %s: %s', v_held.message_id,
                       v_held.message_type, v_held.key, p_attempts, p_error_class, p_error),
                'delivery.whenExhausted');
    END IF;
    PERFORM advance_keys(p_processor_id, p_partition, ARRAY[v_held.key]);
    RETURN 1;
END
$function$;
