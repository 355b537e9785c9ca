CREATE OR REPLACE FUNCTION :"schema".is_beyond_line(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Did a person put a checkpoint beyond the stop line, and is done with it? No worker can. A window is beyond if it sees the
-- mark and does not end at the line itself. What lies beyond the server's own transaction ids is no place to wait for.
SELECT EXISTS (
    SELECT 1
    FROM processor_partitions d
    JOIN processor_checkpoints c ON c.processor_id = d.processor_id AND c.partition < d.partition_count
    CROSS JOIN LATERAL (SELECT coalesce(c.upper_snapshot, c.lower_snapshot) AS snapshot) AS w
    WHERE d.processor_id = p_processor_id
      AND CASE WHEN d.line_mark IS NULL
          THEN (c.last_processed_transaction_id, c.last_processed_position) > (d.line_transaction_id, d.line_position)
               AND c.last_processed_transaction_id < pg_snapshot_xmax(pg_current_snapshot())
          ELSE pg_visible_in_snapshot(d.line_mark, w.snapshot)
               AND w.snapshot::text IS DISTINCT FROM d.line_snapshot::text
               AND pg_snapshot_xmax(w.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) END
      AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                      WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                        AND f.needs_person AND f.resolved_at IS NULL))
$function$;
