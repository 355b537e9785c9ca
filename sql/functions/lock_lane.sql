CREATE OR REPLACE FUNCTION :"schema".lock_lane(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Whoever changes held messages or dead letters from outside waits for the owner's open transaction and keeps the next
-- one waiting: what is behind what is only changed by one at a time.
BEGIN
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition FOR UPDATE;
END
$function$;
