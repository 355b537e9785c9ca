CREATE OR REPLACE FUNCTION :"schema".stranger_refusals(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Refused calls of callers without an epoch. Approximate: a sequence may jump by up to 32 over a crash of the server.
SELECT coalesce(pg_sequence_last_value(to_regclass(quote_ident('strangers_' || md5(p_processor_id)))), 0)
$function$;
