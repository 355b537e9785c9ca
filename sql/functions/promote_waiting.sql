CREATE OR REPLACE FUNCTION :"schema".promote_waiting(p_queue text, p_limit int, p_failed boolean) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Moves messages whose time has come to those that are handed out, as newly stored ones; p_failed: of those that failed before,
-- else of the others. Their unique keys are freed first, for keep_unique takes them again as each is stored; a producer that
-- stores the same key meanwhile waits, and then finds it taken. A message whose key was not freed, because another one has it
-- (an UPDATE by hand; two with one id and key, which were stored before this was refused), goes on without: keep_unique would
-- drop it.
DECLARE
    v_count int;
BEGIN
    EXECUTE format($sql$
        WITH due AS (
            DELETE FROM %1$I WHERE ctid = ANY (ARRAY(
                SELECT w.ctid FROM %1$I AS w WHERE w.deliver_after <= clock_timestamp() AND w.last_error IS %4$s
                ORDER BY w.deliver_after LIMIT $1 FOR UPDATE SKIP LOCKED))
            RETURNING *),
        freed AS (
            DELETE FROM %3$I k USING due
            WHERE k.unique_key = due.unique_key AND k.message_id = due.message_id
            RETURNING k.unique_key)
        INSERT INTO %2$I (publication_id, partition_key, message_id, message_type, data, metadata, scheduled, priority,
                          unique_key, attempts, last_error)
        SELECT d.publication_id, d.partition_key, d.message_id, d.message_type, d.data, d.metadata, d.deliver_after, d.priority,
               CASE WHEN row_number() OVER (PARTITION BY k.unique_key ORDER BY d.deliver_after) = 1 THEN k.unique_key END,
               d.attempts, d.last_error
        FROM due AS d
        CROSS JOIN (SELECT count(*) FROM freed) AS f  -- all are freed before the first is stored
        LEFT JOIN freed AS k ON k.unique_key = d.unique_key
        ORDER BY d.deliver_after$sql$, 'queue_' || p_queue || '_delayed', 'queue_' || p_queue, 'queue_' || p_queue || '_keys',
        CASE WHEN p_failed THEN 'NOT NULL' ELSE 'NULL' END)
    USING p_limit;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
