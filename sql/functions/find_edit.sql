CREATE OR REPLACE FUNCTION :"schema".find_edit(p_processor_id text, p_partition int)
RETURNS TABLE (kept_transaction_id xid8, kept_position bigint, transaction_id xid8, "position" bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- One row if somebody changed or deleted the checkpoint past our functions: the pair that they had stored (null: the whole row
-- was written by hand) and the one that is there (null: none). Against mistakes, not against forgery: the copy is in the row,
-- and whoever may write that can write the copy too. A first row that was inserted by hand is nobody's edit.
-- VOLATILE for its snapshot's sake: see rewrite_checkpoints.
SELECT c.kept_transaction_id, c.kept_position, c.last_processed_transaction_id, c.last_processed_position
FROM kept_checkpoints k
LEFT JOIN processor_checkpoints c ON c.processor_id = k.processor_id AND c.partition = k.partition
WHERE k.processor_id = p_processor_id AND k.partition = p_partition
  AND (c.kept_position IS NULL
       OR (c.kept_transaction_id, c.kept_position) <> (c.last_processed_transaction_id, c.last_processed_position)
       OR c.kept_window IS DISTINCT FROM CASE c.cursor_kind
          WHEN 'Snapshot' THEN window_seal(c.lower_snapshot, c.upper_snapshot, c.window_position) END)
$function$;
