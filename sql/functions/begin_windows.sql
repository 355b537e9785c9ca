CREATE OR REPLACE FUNCTION :"schema".begin_windows(
    p_processor_id text, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Right after begin_partitions, in its transaction: all partitions start from this one window. False: not the owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    -- Only what begin_partitions has just written: no row of a table has transaction id 0, and no pair is 0:1.
    UPDATE processor_checkpoints c
    SET cursor_kind = 'Snapshot', lower_snapshot = p_lower, upper_snapshot = p_upper, window_position = p_position
    WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'TransactionOrder'
      AND c.last_processed_transaction_id = '0' AND c.last_processed_position = 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;
