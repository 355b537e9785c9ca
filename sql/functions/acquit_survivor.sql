CREATE OR REPLACE FUNCTION :"schema".acquit_survivor(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Whoever was counted as dead and calls again was frozen, cut off, or waiting: no message killed it.
-- Of held messages the latest death is remembered by its process.
WITH held AS (
    UPDATE held_messages h SET deaths = greatest(h.deaths - 1, 0)
    FROM processor_suspicions s, unnest(s.died_transaction_ids, s.died_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.died_token = p_token
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position
)
UPDATE processor_suspicions s
SET died_token = nullif(s.died_token, p_token),
    died_transaction_ids = CASE WHEN s.died_token = p_token THEN '{}' ELSE s.died_transaction_ids END,
    died_positions = CASE WHEN s.died_token = p_token THEN '{}' ELSE s.died_positions END,
    deaths = greatest(s.deaths - 1, 0), accused = array_remove(s.accused, p_token),
    kills = greatest(s.kills - (p_token = ANY (s.accused_alone))::int, 0),
    accused_alone = array_remove(s.accused_alone, p_token)
WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND (p_token = ANY (s.accused) OR s.died_token = p_token)
$function$;
