CREATE OR REPLACE FUNCTION :"schema".keep_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid, p_lease interval
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Right before a batch is handed over: is the lease ours, with four fifths of its time or more? Renewed only where it has
-- less: a row written for each batch would wear.
DECLARE
    v_expires timestamptz;
BEGIN
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition AND l.epoch = p_epoch AND l.token = p_token
      AND l.expires_at > clock_timestamp();
    RETURN FOUND AND (v_expires > clock_timestamp() + p_lease * 0.8
                      OR renew_lease(p_processor_id, p_partition, p_epoch, p_token, p_lease));
END
$function$;
