CREATE OR REPLACE FUNCTION :"schema".acquit_survivor(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Whoever was counted as dead and calls again was frozen, cut off, or waiting: no message killed it.
UPDATE processor_suspicions s
SET deaths = greatest(s.deaths - 1, 0), accused = array_remove(s.accused, p_token),
    kills = greatest(s.kills - (p_token = ANY (s.accused_alone))::int, 0),
    accused_alone = array_remove(s.accused_alone, p_token)
WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND p_token = ANY (s.accused)
$function$;
