-- The table of checkpoints is emptied no more: a dump that ran beside it could have none of them.

CREATE OR REPLACE FUNCTION :"schema".rewrite_checkpoints(p_bytes bigint) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Does nothing: for workers of former versions, which ask for it every ten seconds. It wrote the living rows anew into the
-- emptied table, and a pg_dump whose snapshot was older than that, and whose lock came later, had no checkpoint in it.
SELECT false
$function$;
