CREATE OR REPLACE FUNCTION :"schema".defer_message(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int, p_action text, p_wait interval, p_attempts int,
    p_transaction_id xid8, p_position bigint, p_message_id text, p_message_type text, p_publication_id text,
    p_partition_key text, p_data jsonb, p_metadata jsonb, p_scheduled timestamptz, p_error_class text, p_error text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first message of what is left of a batch failed alone: it leaves the batch, to be tried again ('Retry'), to be kept for a person
-- ('DeadLetter') or to be forgotten ('Skip'). False as complete_batch(): nothing was done.
DECLARE
    v_queue text;
    v_lane int;
    v_copy competing_copies;
BEGIN
    SELECT c.* INTO v_copy FROM competing_copies c
    WHERE c.processor_id = p_processor_id AND c.transaction_id = p_transaction_id AND c.position = p_position;
    SELECT p.queue, b.lane INTO v_queue, v_lane FROM competing_batches b JOIN competing_processors p USING (processor_id)
    WHERE b.processor_id = p_processor_id AND b.id = p_batch;
    IF NOT complete_batch(p_processor_id, p_batch, p_owner, p_attempt, p_transaction_id, p_position, 1) THEN
        RETURN false;
    END IF;
    CASE p_action
        WHEN 'DeadLetter' THEN
            INSERT INTO dead_letters
                (processor_id, key, transaction_id, position, message_id, message_type, publication_id, partition_key,
                 data, metadata, scheduled, attempts, error_class, error, priority)
            VALUES (p_processor_id, coalesce(p_partition_key, p_message_id), p_transaction_id, p_position, p_message_id, p_message_type,
                    p_publication_id, p_partition_key, p_data, p_metadata, p_scheduled, p_attempts, p_error_class, p_error,
                    CASE WHEN v_queue IS NOT NULL THEN v_lane END);
        WHEN 'Skip' THEN
            INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            VALUES ('Skip', p_processor_id, 0, p_transaction_id, p_position,
                    format('message %s of type %s, key %s, after %s attempts: %s: %s', p_message_id, p_message_type,
                           coalesce(p_partition_key, p_message_id), p_attempts, p_error_class, p_error),
                    'delivery.whenExhausted');
        WHEN 'Retry' THEN
            IF v_queue IS NULL THEN
                INSERT INTO competing_retries
                    (processor_id, transaction_id, position, message_id, attempts, due_at, error_class, error)
                VALUES (p_processor_id, p_transaction_id, p_position, p_message_id, p_attempts,
                        clock_timestamp() + p_wait, p_error_class, p_error);
                IF v_copy.processor_id IS NOT NULL THEN
                    INSERT INTO competing_copies SELECT v_copy.*;
                END IF;
            ELSE
                EXECUTE format(
                    'INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled,
                                     priority, deliver_after, attempts, last_error)
                     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp() + $9, $10, $11)', 'queue_' || v_queue)
                USING p_message_id, p_message_type, p_publication_id, p_partition_key, p_data, p_metadata, p_scheduled,
                      v_lane, p_wait, p_attempts, p_error_class || ': ' || p_error;
            END IF;
    END CASE;
    RETURN true;
END
$function$;
