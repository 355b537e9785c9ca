CREATE OR REPLACE FUNCTION :"schema".advance_lanes(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_standing text, p_partitions int[],
    p_transaction_ids xid8[], p_counters bigint[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The owner of one partition has handled, in this transaction, what others had before them (a swap): their checkpoints go
-- there, and their leases end, so that whoever owned them reads anew. p_standing: where the others stood when that was
-- begun (standing_of without the caller's own). False: one of them stored something since, or the caller is no owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) OR p_partition = ANY (p_partitions) THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions) ORDER BY l.partition FOR UPDATE;
    PERFORM 1 FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition <> p_partition ORDER BY c.partition FOR UPDATE;
    IF standing_of(p_processor_id, p_partition) IS DISTINCT FROM p_standing THEN
        RETURN false;
    END IF;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions);
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n.counter,
        lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, window_position = n."position",
        stored_at = clock_timestamp()
    FROM unnest(p_partitions, p_transaction_ids, p_counters, p_lowers, p_uppers, p_positions)
        AS n (partition, transaction_id, counter, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition;
    PERFORM keep_checkpoint(p_processor_id, n.partition) FROM unnest(p_partitions) AS n (partition);
    RETURN true;
END
$function$;
