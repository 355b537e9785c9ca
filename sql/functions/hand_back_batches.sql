CREATE OR REPLACE FUNCTION :"schema".hand_back_batches(p_processor_id text, p_owner text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A consumer leaves, or does not know what became of its last commit: what it has not finished is anybody's at once, and no attempt is used.
DECLARE
    v_count int;
BEGIN
    UPDATE competing_batches b SET owner = NULL, pod = NULL, expires_at = '-infinity'
    WHERE b.processor_id = p_processor_id AND b.owner = p_owner;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
