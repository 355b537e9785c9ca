CREATE OR REPLACE FUNCTION :"schema".window_seal(p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint)
RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A window in 16 bytes: its copy need not be as long as a list of transactions in progress can be.
SELECT md5(coalesce(p_lower::text, '') || '/' || coalesce(p_upper::text, '') || '/'
           || coalesce(p_position::text, ''))::uuid
$function$;
