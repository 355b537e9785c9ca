CREATE OR REPLACE FUNCTION :"schema".is_key_blocked(
    p_processor_id text, p_partition int, p_key text, p_before bigint
) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Must a message of this key wait: is one held before place `p_before` that blocks it, or dead and undecided?
    SELECT EXISTS (SELECT 1 FROM held_messages h
                   WHERE h.processor_id = p_processor_id AND h.partition = p_partition
                     AND h.key_hash = hashtextextended(p_key, 0) AND h.key = p_key AND h.blocks AND h.place < p_before)
        OR EXISTS (SELECT 1 FROM dead_letters d
                   WHERE d.processor_id = p_processor_id AND d.partition = p_partition
                     AND d.key_hash = hashtextextended(p_key, 0) AND d.key = p_key AND d.blocks)
$function$;
