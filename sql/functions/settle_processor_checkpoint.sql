CREATE OR REPLACE FUNCTION :"schema".settle_processor_checkpoint(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, transaction_id xid8, "position" bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What is stored, for an owner that does not know whether its COMMIT arrived: waits until that transaction is over.
-- 55P03 while it is not: ask again. Call it in a transaction of its own, in READ COMMITTED.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        -- A first row that is not committed yet is invisible, but its key is taken.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, p_partition, '0', 0) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
        ELSE
            SELECT c.* INTO v_stored FROM processor_checkpoints c
            WHERE c.processor_id = p_processor_id AND c.partition = p_partition
            FOR UPDATE;
            transaction_id := v_stored.last_processed_transaction_id;
            "position" := v_stored.last_processed_position;
        END IF;
    END IF;
    RETURN NEXT;
END
$function$;
