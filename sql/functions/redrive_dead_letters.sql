CREATE OR REPLACE FUNCTION :"schema".redrive_dead_letters(
    p_processor_id text, p_partition int, p_ids bigint[], p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Give dead letters back to the processor, due now, each at its place in the order of its key (mode
-- Competing has none). Recorded. What is not
-- there any more was redriven or dropped before, and does not count.
DECLARE
    v_count int;
BEGIN
    PERFORM lock_lane(p_processor_id, p_partition);
    IF EXISTS (SELECT 1 FROM competing_processors p WHERE p.processor_id = p_processor_id) THEN
        v_count := redrive_competing(p_processor_id, p_ids);
    ELSE
        WITH back AS (
            DELETE FROM dead_letters d
            WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
            RETURNING d.*
        )
        INSERT INTO held_messages AS h (processor_id, partition, key, place, transaction_id, position, message_id,
                                        message_type, publication_id, partition_key, data, metadata, scheduled, blocks,
                                        behind)
        SELECT b.processor_id, b.partition, coalesce(b.key, b.message_id), coalesce(b.place, nextval('held_order')), b.transaction_id, b.position, b.message_id, b.message_type,
               b.publication_id, b.partition_key, b.data, b.metadata, b.scheduled, b.blocks, false
        FROM back b ORDER BY b.place
        ON CONFLICT (processor_id, partition, transaction_id, position) DO UPDATE
        SET behind = false, attempts = 0, deaths = 0, next_attempt_at = clock_timestamp();
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    IF v_count > 0 THEN
        INSERT INTO recorded_acts (act, processor_id, partition, reason, decided_by)
        VALUES ('Redrive', p_processor_id, p_partition, format('%s dead letters: %s', v_count, p_reason), p_decided_by);
    END IF;
    RETURN v_count;
END
$function$;
