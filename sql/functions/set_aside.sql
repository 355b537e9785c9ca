CREATE OR REPLACE FUNCTION :"schema".set_aside(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint that passes them: keep messages that are not handled now. Of `p_rows`, in reading
-- order, the one with attempts > 0 failed and becomes what `p_action` says (Hold, DeadLetter, Skip); the others wait,
-- behind a message of their key or until `next_attempt_at`. What became due since it was read waits behind what blocks its
-- key here, not behind what is given up here. -1: not the owner. Else how many are held.
DECLARE
    v_now timestamptz := clock_timestamp();
    v_kept int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    IF p_action = 'DeadLetter' THEN
        INSERT INTO dead_letters (processor_id, partition, key, transaction_id, position, message_id, message_type,
                                  publication_id, partition_key, data, metadata, scheduled, attempts, error_class,
                                  error, blocks, place)
        SELECT p_processor_id, p_partition, r.key, r.transaction_id, r.position, r.message_id, r.message_type,
               r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled, p_attempts, p_error_class,
               p_error, p_blocks, nextval('held_order')
        FROM unnest(p_rows) AS r WHERE r.attempts > 0;
    ELSIF p_action = 'Skip' THEN
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, p_partition, r.transaction_id, r.position,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', r.message_id, r.message_type,
                      r.key, p_attempts, p_error_class, p_error),
               'delivery.whenExhausted'
        FROM unnest(p_rows) AS r WHERE r.attempts > 0;
    END IF;
    INSERT INTO held_messages (processor_id, partition, key, place, transaction_id, position, message_id, message_type,
                               publication_id, partition_key, data, metadata, scheduled, blocks, behind, attempts,
                               error_class, error, next_attempt_at)
    SELECT p_processor_id, p_partition, r.key, nextval('held_order'), r.transaction_id, r.position, r.message_id,
           r.message_type, r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled,
           CASE WHEN r.failed THEN p_blocks ELSE NOT r.delayed END,
           NOT r.failed AND NOT r.delayed
               AND (r.before OR is_key_blocked(p_processor_id, p_partition, r.key, 9223372036854775807)),
           CASE WHEN r.failed THEN p_attempts ELSE 0 END,
           CASE WHEN r.failed THEN p_error_class END, CASE WHEN r.failed THEN p_error END,
           CASE WHEN r.failed THEN coalesce(v_now + p_wait, 'infinity')
                WHEN r.delayed THEN r.next_attempt_at ELSE v_now END
    FROM (SELECT u.*, u.attempts > 0 AS failed,
                 u.attempts = 0 AND coalesce(u.next_attempt_at > v_now, false) AS delayed,
                 coalesce(bool_or(CASE WHEN u.attempts > 0 THEN p_action = 'Hold' AND p_blocks
                                       ELSE NOT coalesce(u.next_attempt_at > v_now, false) END)
                          OVER (PARTITION BY u.key ORDER BY u.ordinality
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS before
          FROM unnest(p_rows) WITH ORDINALITY AS u) AS r
    WHERE NOT r.failed OR p_action = 'Hold'
    ORDER BY r.ordinality
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END
$function$;
