CREATE OR REPLACE FUNCTION :"schema".vacate_claim(p_processor_id text, p_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The last sign of a process that was not told why it must stop: others may claim after the grace.
BEGIN
    UPDATE processor_claims c SET vacated_at = clock_timestamp()
    WHERE c.processor_id = p_processor_id AND c.uid = p_uid AND c.vacated_at IS NULL;
    RETURN FOUND;
END
$function$;
