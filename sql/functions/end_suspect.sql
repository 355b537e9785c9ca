CREATE OR REPLACE FUNCTION :"schema".end_suspect(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What begin_suspect or take_due_messages wrote down was tried, and the process lives: whatever becomes of it later is no
-- death of theirs.
UPDATE processor_suspicions s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
WHERE s.processor_id = p_processor_id AND s.partition = p_partition
  AND holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token)
$function$;
