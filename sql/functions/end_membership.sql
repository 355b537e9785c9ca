CREATE OR REPLACE FUNCTION :"schema".end_membership(p_processor_id text, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process leaves: its partitions are free at once, and the others divide them among themselves.
BEGIN
    DELETE FROM processor_members m WHERE m.processor_id = p_processor_id AND m.token = p_token;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.token = p_token;
END
$function$;
