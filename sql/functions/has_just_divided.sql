CREATE OR REPLACE FUNCTION :"schema".has_just_divided(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is the caller the owner whose own transaction divided the processor (begin_partitions)? Nobody has read from its starts yet.
SELECT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) AND EXISTS (
    SELECT 1 FROM processor_partitions d
    WHERE d.processor_id = p_processor_id AND d.xmin = pg_current_xact_id()::xid)
$function$;
