CREATE OR REPLACE FUNCTION :"schema".claim_key(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What callers without an epoch lock in common, and whoever makes a claim alone.
SELECT hashtextextended(format('outbox claim %I %s', current_schema(), p_processor_id), 0)
$function$;
