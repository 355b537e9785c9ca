CREATE OR REPLACE FUNCTION :"schema".is_behind_its_rows() RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a message or a checkpoint stored here whose transaction id is above that of the transaction that wrote the row? Then it came from a
-- server that was further on, and what is written here since sorts before it. True for good, also once this server's
-- counter has passed it; until `outbox repair`. Checkpoints of another database's messages say nothing. Scans the outbox once.
DECLARE
    v_now bigint := pg_current_xact_id()::text::bigint;  -- assigned first: age() counts from it
    v_value text;
    v_found boolean;
BEGIN
    -- A snapshot's beginning is at most the transaction that takes it; its end may be beyond.
    FOR v_value IN
        SELECT CASE a.atttypid WHEN 'xid8'::regtype THEN format('c.%I', a.attname)
                               ELSE format('pg_snapshot_xmin(c.%I)', a.attname) END
        FROM pg_attribute a
        WHERE a.attrelid = 'processor_checkpoints'::regclass AND a.attnum > 0 AND NOT a.attisdropped
          AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype)
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE (%s)::text::numeric > $1 - age(c.xmin) '
                       'AND NOT EXISTS (SELECT 1 FROM processor_sources s WHERE s.processor_id = c.processor_id))', v_value)
        INTO v_found USING v_now;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN EXISTS (SELECT 1 FROM messages o WHERE o.transaction_id::text::numeric > v_now - age(o.xmin));
END
$function$;
