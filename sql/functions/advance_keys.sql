CREATE OR REPLACE FUNCTION :"schema".advance_keys(p_processor_id text, p_partition int, p_keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Something of these keys was handled, dropped or skipped: the first that waits behind it is due, unless a dead letter
-- still blocks the key. One look for each key, however many wait.
    UPDATE held_messages h SET behind = false, next_attempt_at = clock_timestamp()
    FROM (SELECT DISTINCT k FROM unnest(p_keys) AS k) AS wanted
    CROSS JOIN LATERAL (
        SELECT f.transaction_id, f.position, f.behind FROM held_messages f
        WHERE f.processor_id = p_processor_id AND f.partition = p_partition
          AND f.key_hash = hashtextextended(wanted.k, 0) AND f.key = wanted.k AND f.blocks
        ORDER BY f.place LIMIT 1) AS first
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND first.behind
      AND h.transaction_id = first.transaction_id AND h.position = first.position
      AND NOT EXISTS (SELECT 1 FROM dead_letters d
                      WHERE d.processor_id = p_processor_id AND d.partition = p_partition
                        AND d.key_hash = hashtextextended(wanted.k, 0) AND d.key = wanted.k AND d.blocks)
$function$;
