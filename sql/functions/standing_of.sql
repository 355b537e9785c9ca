CREATE OR REPLACE FUNCTION :"schema".standing_of(p_processor_id text, p_but_partition int DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Where a processor stands, in words that differ if anything of it does: to see that nobody stored anything meanwhile.
SELECT string_agg(concat_ws(' ', c.partition, c.last_processed_transaction_id, c.last_processed_position,
                            coalesce(c.lower_snapshot::text, '-'), coalesce(c.upper_snapshot::text, '-'),
                            coalesce(c.window_position::text, '-')), ', ' ORDER BY c.partition)
FROM processor_checkpoints c
WHERE c.processor_id = p_processor_id AND c.partition IS DISTINCT FROM p_but_partition
$function$;
