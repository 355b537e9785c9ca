CREATE OR REPLACE FUNCTION :"schema".prune_conflicts(p_processor_id text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor keeps its last 1,000 refusals, and besides every one that waits for a person. What goes is counted.
WITH gone AS (
    DELETE FROM processor_conflicts f
    WHERE f.processor_id = p_processor_id AND (NOT f.needs_person OR f.resolved_at IS NOT NULL)
      AND f.id <= (SELECT k.id FROM processor_conflicts k WHERE k.processor_id = p_processor_id
                   ORDER BY k.id DESC OFFSET 1000 LIMIT 1)
    RETURNING f.code
)
INSERT INTO pruned_conflicts AS p (processor_id, code, count)
SELECT p_processor_id, g.code, count(*) FROM gone g GROUP BY g.code ORDER BY g.code
ON CONFLICT (processor_id, code) DO UPDATE SET count = p.count + excluded.count
$function$;
