CREATE OR REPLACE FUNCTION :"schema".spread_start(
    p_processor_id text, p_partitions int[], p_transaction_ids xid8[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Each partition starts at a pair of its own: only in the transaction that divided the processor (begin_partitions), and
-- never before the pair that all of them were given there.
BEGIN
    IF NOT has_just_divided(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n."position"
    FROM unnest(p_partitions, p_transaction_ids, p_positions) AS n (partition, transaction_id, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition
      AND (n.transaction_id, n."position") > (c.last_processed_transaction_id, c.last_processed_position);
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;
