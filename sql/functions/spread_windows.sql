CREATE OR REPLACE FUNCTION :"schema".spread_windows(
    p_processor_id text, p_partitions int[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- As spread_start, for the cursor Snapshot: after begin_windows, in the transaction that divided the processor.
BEGIN
    IF NOT has_just_divided(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, window_position = n."position"
    FROM unnest(p_partitions, p_lowers, p_uppers, p_positions) AS n (partition, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition AND c.cursor_kind = 'Snapshot';
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;
