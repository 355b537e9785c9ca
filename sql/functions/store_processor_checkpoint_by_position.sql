CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_position bigint, p_expected_position bigint, p_transaction_id xid8
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The article's form, for scripts written against it: 4 wherever a claim exists, and counted. It cannot name the
-- expected pair: it expects whatever pair is stored with that position. Use the form with eight arguments.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    IF refuses_stranger(p_processor_id, 0) THEN
        RETURN 4;
    END IF;
    IF p_expected_position IS NOT NULL THEN
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = p_processor_id AND c.partition = 0
        FOR UPDATE;
        IF FOUND AND (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
                     IS DISTINCT FROM (p_transaction_id, p_position)
                 AND v_stored.last_processed_position <> p_expected_position THEN
            RETURN CASE WHEN v_stored.last_processed_position > p_expected_position THEN 2 ELSE 3 END;
        ELSIF FOUND AND (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
                        = (p_transaction_id, p_position) THEN
            RETURN 0;
        END IF;
    END IF;
    RETURN store_processor_checkpoint(
        p_processor_id, 0, p_transaction_id, p_position,
        CASE WHEN p_expected_position IS NOT NULL THEN coalesce(v_stored.last_processed_transaction_id, '0'::xid8) END,
        p_expected_position, NULL, NULL);
END
$function$;
