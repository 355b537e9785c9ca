CREATE OR REPLACE FUNCTION :"schema".renew_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid, p_lease interval
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat. False: the lease lapsed or is another's; it does not come back, acquire a new one.
BEGIN
    UPDATE processor_leases l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
      AND l.epoch = p_epoch AND l.token = p_token AND l.expires_at > clock_timestamp();
    RETURN FOUND;
END
$function$;
