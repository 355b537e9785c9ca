CREATE OR REPLACE FUNCTION :"schema".promote_delayed(p_queue text, p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Moves messages whose time has come to those that are handed out, as newly stored ones.
DECLARE
    v_count int;
BEGIN
    EXECUTE format($sql$
        WITH due AS (
            DELETE FROM %1$I WHERE ctid = ANY (ARRAY(
                SELECT w.ctid FROM %1$I AS w WHERE w.deliver_after <= clock_timestamp()
                ORDER BY w.deliver_after LIMIT $1 FOR UPDATE SKIP LOCKED))
            RETURNING *)
        INSERT INTO %2$I (publication_id, partition_key, message_id, message_type, data, metadata, scheduled, priority,
                          unique_key, attempts, last_error)
        SELECT publication_id, partition_key, message_id, message_type, data, metadata, deliver_after, priority,
               unique_key, attempts, last_error
        FROM due ORDER BY deliver_after$sql$, 'queue_' || p_queue || '_delayed', 'queue_' || p_queue)
    USING p_limit;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
