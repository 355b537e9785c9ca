-- Who may say where the partitions of a processor that was just divided begin.

CREATE OR REPLACE FUNCTION :"schema".has_just_divided(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is the caller the owner whose own transaction divided the processor (begin_partitions)? Nobody has read from its starts yet.
SELECT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) AND EXISTS (
    SELECT 1 FROM processor_partitions d
    WHERE d.processor_id = p_processor_id AND d.xmin = pg_current_xact_id()::xid)
$function$;

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

REVOKE EXECUTE ON FUNCTION :"schema".has_just_divided(text, int, bigint, uuid) FROM PUBLIC;
