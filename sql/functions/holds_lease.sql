CREATE OR REPLACE FUNCTION :"schema".holds_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is this epoch and token the live owner's? If so the lease row stays locked FOR KEY SHARE to the end of the caller's
-- transaction: that conflicts with a takeover (FOR UPDATE), not with the heartbeat (an update of other columns).
DECLARE
    v_lease processor_leases;
BEGIN
    IF p_epoch IS NULL OR p_owner_token IS NULL THEN
        RETURN false;
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        -- A lease that the snapshot cannot see: the insert fails with 40001 instead of answering from the past.
        INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM processor_leases l WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
            RETURN false;
        END IF;
    ELSE
        -- Whoever is not the owner leaves no lock behind.
        PERFORM 1 FROM processor_leases l
        WHERE l.processor_id = p_processor_id AND l.partition = p_partition
          AND l.epoch = p_epoch AND l.token = p_owner_token AND l.expires_at > clock_timestamp();
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    SELECT l.* INTO v_lease FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR KEY SHARE;
    RETURN coalesce(
        v_lease.epoch = p_epoch AND v_lease.token = p_owner_token AND v_lease.expires_at > clock_timestamp(), false);
END
$function$;
