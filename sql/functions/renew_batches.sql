CREATE OR REPLACE FUNCTION :"schema".renew_batches(
    p_processor_id text, p_owner text, p_lease interval, p_batch bigint DEFAULT NULL, p_attempt int DEFAULT NULL
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat of a consumer: how many batches are still its own. With a batch and its attempt: whether that one is.
DECLARE
    v_count int;
BEGIN
    UPDATE competing_batches b SET expires_at = clock_timestamp() + p_lease
    WHERE b.processor_id = p_processor_id AND b.owner = p_owner
      AND (p_batch IS NULL OR (b.id = p_batch AND b.attempt = p_attempt));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
