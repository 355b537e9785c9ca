CREATE OR REPLACE FUNCTION :"schema".end_leases(p_processor_id text, p_keep_claim_uid text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A claim that changes hands ends the leases of its former holder. Waits for a checkpoint that is being committed.
BEGIN
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.claim_uid IS DISTINCT FROM p_keep_claim_uid
    ORDER BY l.partition
    FOR UPDATE;
    UPDATE processor_leases l
    SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.claim_uid IS DISTINCT FROM p_keep_claim_uid;
END
$function$;
