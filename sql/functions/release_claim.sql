CREATE OR REPLACE FUNCTION :"schema".release_claim(p_processor_id text, p_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The resource is going: the claim and its leases end now. The checkpoint stays. False: the claim was not this resource's.
BEGIN
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_uid FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM end_leases(p_processor_id, NULL);
    DELETE FROM processor_claims c WHERE c.processor_id = p_processor_id;
    RETURN true;
END
$function$;
