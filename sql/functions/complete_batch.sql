CREATE OR REPLACE FUNCTION :"schema".complete_batch(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int,
    p_upto_transaction_id xid8, p_upto_position bigint, p_messages int
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages, up to the pair, are done: all of the batch, or its beginning. False: it is not this owner's attempt any more; then
-- the caller rolls its effects back. From true to the caller's commit nobody can take the batch over.
DECLARE
    v_done record;
BEGIN
    DELETE FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND b.id = p_batch AND b.owner = p_owner AND b.attempt = p_attempt
      AND (b.upto_transaction_id, b.upto_position) <= (p_upto_transaction_id, p_upto_position)
    RETURNING b.after_transaction_id AS t, b.after_position AS p, b.transaction_ids, b.positions INTO v_done;
    IF NOT FOUND THEN
        UPDATE competing_batches b
        SET after_transaction_id = p_upto_transaction_id, after_position = p_upto_position, deaths = 0,
            messages = greatest(0, b.messages - p_messages),
            piece = CASE WHEN b.piece * 2 < b.messages - p_messages THEN b.piece * 2 END
        FROM competing_batches was
        WHERE was.processor_id = p_processor_id AND was.id = p_batch
          AND b.processor_id = p_processor_id AND b.id = p_batch AND b.owner = p_owner AND b.attempt = p_attempt
          AND (b.after_transaction_id, b.after_position) < (p_upto_transaction_id, p_upto_position)
        RETURNING was.after_transaction_id AS t, was.after_position AS p, b.transaction_ids, b.positions INTO v_done;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    IF v_done.positions IS NOT NULL THEN
        -- Of these messages only: one that left the batch before has its copy anew.
        DELETE FROM competing_copies c
        USING unnest(v_done.transaction_ids, v_done.positions) AS l (t, p)
        WHERE c.processor_id = p_processor_id AND c.transaction_id = l.t AND c.position = l.p
          AND (l.t, l.p) > (v_done.t, v_done.p) AND (l.t, l.p) <= (p_upto_transaction_id, p_upto_position);
    END IF;
    RETURN true;
END
$function$;
