CREATE OR REPLACE FUNCTION :"schema".hand_over_claim(
    p_processor_id text, p_uid text, p_to_cluster text, p_to_namespace text, p_to_name text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The holder names its successor, whose uid it need not know: nobody else can claim in between.
BEGIN
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_uid FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM end_leases(p_processor_id, NULL);
    UPDATE processor_claims c
    SET cluster = p_to_cluster, namespace = p_to_namespace, name = p_to_name, uid = '', vacated_at = NULL,
        claimed_at = clock_timestamp()
    WHERE c.processor_id = p_processor_id;
    RETURN true;
END
$function$;
