CREATE OR REPLACE FUNCTION :"schema".redrive_competing(p_processor_id text, p_ids bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Dead letters of consumers: those of the outbox are handed out as messages whose time has come, those of a queue are stored in it anew,
-- with the message id, the priority and the age that they had. No attempt is used yet. Their keys keep no order in this mode.
DECLARE
    v_queue text;
    v_count int;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    IF v_queue IS NULL THEN
        WITH back AS (
            DELETE FROM dead_letters d WHERE d.processor_id = p_processor_id AND d.id = ANY (p_ids) RETURNING d.*
        ), kept AS (
            INSERT INTO competing_copies (processor_id, transaction_id, position, message_id, message_type, publication_id,
                                          partition_key, data, metadata, scheduled)
            SELECT b.processor_id, b.transaction_id, b.position, b.message_id, b.message_type, b.publication_id,
                   b.partition_key, b.data, b.metadata, b.scheduled
            FROM back b ON CONFLICT DO NOTHING
        )
        INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, due_at, error_class, error)
        SELECT b.processor_id, b.transaction_id, b.position, b.message_id, clock_timestamp(), b.error_class, b.error
        FROM back b ON CONFLICT DO NOTHING;
    ELSE
        EXECUTE format($sql$
            WITH back AS (
                DELETE FROM dead_letters d WHERE d.processor_id = $1 AND d.id = ANY ($2) RETURNING d.*
            )
            INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled, priority)
            SELECT b.message_id, b.message_type, b.publication_id, b.partition_key, b.data::jsonb, b.metadata::jsonb,
                   coalesce(b.scheduled, b.died_at), coalesce(b.priority, 5)
            FROM back b ORDER BY b.id$sql$, 'queue_' || v_queue)
        USING p_processor_id, p_ids;
    END IF;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
