CREATE OR REPLACE FUNCTION :"schema".partitions_are_at_line(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May the number of partitions change now? Every partition's checkpoint is at the stop line, no conflict waits for a
-- person, and no key is blocked: by a message that failed and is held, or by a dead letter.
SELECT d.next_count IS NOT NULL
    AND d.partition_count = (
        SELECT count(*) FROM processor_checkpoints c
        WHERE c.processor_id = d.processor_id AND c.partition BETWEEN 0 AND d.partition_count - 1
          AND CASE WHEN d.line_mark IS NULL
                   THEN (c.last_processed_transaction_id, c.last_processed_position)
                        = (d.line_transaction_id, d.line_position)
                   ELSE c.lower_snapshot::text = d.line_snapshot::text AND c.upper_snapshot IS NULL END)
    AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                    WHERE f.processor_id = d.processor_id AND f.partition BETWEEN 0 AND d.partition_count - 1
                      AND f.needs_person AND f.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM held_messages m
                    WHERE m.processor_id = d.processor_id AND m.blocks AND m.error_class IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM dead_letters m WHERE m.processor_id = d.processor_id AND m.blocks)
FROM processor_partitions d
WHERE d.processor_id = p_processor_id
$function$;
