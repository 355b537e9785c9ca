CREATE OR REPLACE FUNCTION :"schema".fail_held_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_verdicts jsonb
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Held messages failed again, each with its verdict as in hold_messages(): try it later (Hold; without a wait: when a
-- person says so), keep it as a dead letter, or skip it for good. What waits behind a dead letter of its key goes on
-- waiting, if that blocks. -1: not the owner. Else how many of them are still held, before this.
DECLARE
    v_found int;
    v_keys text[];
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    UPDATE held_messages h
    SET attempts = v.attempts, error_class = v.class, error = v.error, blocks = h.blocks OR v.blocks,
        next_attempt_at = coalesce(clock_timestamp() + make_interval(secs => v.wait), 'infinity')
    FROM jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, attempts int, class text, error text,
                                              wait double precision, blocks boolean)
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = v.t AND h.position = v.p;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    WITH gone AS (
        DELETE FROM held_messages h
        USING jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, action text, blocks boolean)
        WHERE v.action <> 'Hold' AND h.processor_id = p_processor_id AND h.partition = p_partition
          AND h.transaction_id = v.t AND h.position = v.p
        RETURNING h.*, v.action, v.blocks AS blocking
    ), dead AS (
        INSERT INTO dead_letters (processor_id, partition, key, place, transaction_id, position, message_id,
                                  message_type, publication_id, partition_key, data, metadata, scheduled, attempts,
                                  error_class, error, blocks)
        SELECT p_processor_id, p_partition, g.key, g.place, g.transaction_id, g.position, g.message_id, g.message_type,
               g.publication_id, g.partition_key, g.data, g.metadata, g.scheduled, g.attempts, g.error_class, g.error,
               g.blocking
        FROM gone g WHERE g.action = 'DeadLetter' ORDER BY g.place
    ), skipped AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, p_partition, g.transaction_id, g.position,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', g.message_id, g.message_type, g.key,
                      g.attempts, g.error_class, g.error),
               'delivery.whenExhausted'
        FROM gone g WHERE g.action = 'Skip' ORDER BY g.place
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    IF v_keys IS NOT NULL THEN
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    END IF;
    RETURN v_found;
END
$function$;
