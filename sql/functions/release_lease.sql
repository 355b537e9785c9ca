CREATE OR REPLACE FUNCTION :"schema".release_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Give the lease back now, so that a standby need not wait for it to lapse.
BEGIN
    UPDATE processor_leases l
    SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition AND l.epoch = p_epoch AND l.token = p_token;
    RETURN FOUND;
END
$function$;
