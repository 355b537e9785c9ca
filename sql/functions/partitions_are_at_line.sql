CREATE OR REPLACE FUNCTION :"schema".partitions_are_at_line(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May the number of partitions change now? Every partition's checkpoint is at the stop line, no conflict waits for a
-- person, and no message that failed is held: behind it wait others of its key, in the order of that partition.
SELECT d.next_count IS NOT NULL
    AND d.partition_count = (
        SELECT count(*) FROM processor_checkpoints c
        WHERE c.processor_id = d.processor_id AND c.partition BETWEEN 0 AND d.partition_count - 1
          AND (c.last_processed_transaction_id, c.last_processed_position) = (d.line_transaction_id, d.line_position))
    AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                    WHERE f.processor_id = d.processor_id AND f.partition BETWEEN 0 AND d.partition_count - 1
                      AND f.needs_person AND f.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM held_messages m WHERE m.processor_id = d.processor_id AND m.error_class IS NOT NULL)
FROM processor_partitions d
WHERE d.processor_id = p_processor_id
$function$;
