CREATE OR REPLACE FUNCTION :"schema".defer_messages(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int, p_upto_transaction_id xid8, p_upto_position bigint,
    p_messages int, p_failed json
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages of a batch, up to the pair, are behind. Those in p_failed failed alone and leave the batch, to be tried again
-- ('Retry', in so many seconds), to be kept for a person ('DeadLetter') or to be forgotten ('Skip'); the others are done. False as
-- complete_batch(): nothing was done.
DECLARE
    v_queue text;
    v_lane int;
    v_copies competing_copies[];
BEGIN
    -- complete_batch() deletes them with what is behind.
    SELECT array_agg(c) INTO v_copies
    FROM json_to_recordset(p_failed) AS f (t xid8, p bigint, action text)
    JOIN competing_copies c ON c.processor_id = p_processor_id AND c.transaction_id = f.t AND c.position = f.p
    WHERE f.action = 'Retry';
    SELECT p.queue, b.lane INTO v_queue, v_lane FROM competing_batches b JOIN competing_processors p USING (processor_id)
    WHERE b.processor_id = p_processor_id AND b.id = p_batch;
    IF NOT complete_batch(p_processor_id, p_batch, p_owner, p_attempt, p_upto_transaction_id, p_upto_position, p_messages) THEN
        RETURN false;
    END IF;
    IF v_copies IS NOT NULL THEN
        INSERT INTO competing_copies SELECT c.* FROM unnest(v_copies) AS c;
    END IF;
    WITH failed AS MATERIALIZED (
        SELECT f.* FROM json_to_recordset(p_failed) AS f (
            t xid8, p bigint, action text, wait float8, attempts int, id text, type text, publication text, key text, data text,
            metadata text, scheduled timestamptz, error_class text, error text)
    ), dead AS (
        INSERT INTO dead_letters
            (processor_id, key, transaction_id, position, message_id, message_type, publication_id, partition_key,
             data, metadata, scheduled, attempts, error_class, error, priority)
        SELECT p_processor_id, coalesce(f.key, f.id), f.t, f.p, f.id, f.type, f.publication, f.key, f.data, f.metadata, f.scheduled,
               f.attempts, f.error_class, f.error, CASE WHEN v_queue IS NOT NULL THEN v_lane END
        FROM failed f WHERE f.action = 'DeadLetter' ORDER BY f.t, f.p
    ), passed_over AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, 0, f.t, f.p,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', f.id, f.type, coalesce(f.key, f.id), f.attempts,
                      f.error_class, f.error),
               'delivery.whenExhausted'
        FROM failed f WHERE f.action = 'Skip' ORDER BY f.t, f.p
    )
    INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, attempts, due_at, error_class, error)
    SELECT p_processor_id, f.t, f.p, f.id, f.attempts, clock_timestamp() + f.wait * interval '1 second', f.error_class, f.error
    FROM failed f WHERE f.action = 'Retry' AND v_queue IS NULL;
    IF v_queue IS NOT NULL THEN
        EXECUTE format($sql$
            INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled, priority,
                            deliver_after, attempts, last_error)
            SELECT f.id, f.type, f.publication, f.key, f.data::jsonb, f.metadata::jsonb, f.scheduled, $2,
                   clock_timestamp() + f.wait * interval '1 second', f.attempts, f.error_class || ': ' || f.error
            FROM json_to_recordset($1) AS f (
                t xid8, p bigint, action text, wait float8, attempts int, id text, type text, publication text, key text, data text,
                metadata text, scheduled timestamptz, error_class text, error text)
            WHERE f.action = 'Retry' ORDER BY f.t, f.p$sql$, 'queue_' || v_queue)
        USING p_failed, v_lane;
    END IF;
    RETURN true;
END
$function$;
