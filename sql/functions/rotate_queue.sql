CREATE OR REPLACE FUNCTION :"schema".rotate_queue(p_processor_id text, p_keep interval, p_segment_bytes bigint)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '100ms'
AS $function$
-- Empties a segment of the processor's queue in which everything is done and older than p_keep, in the snapshot of every
-- transaction (may_empty); once the one that is written to is larger than p_segment_bytes, producers go on in the next empty
-- one. Returns the segments emptied.
DECLARE
    v_done text[] := '{}';
    v_queue text;
    v_last bigint;
    v_child text;
    v_needed boolean;
    v_mark text;
    v_busy text := $sql$
        WITH lanes AS MATERIALIZED (
            SELECT DISTINCT ON (f.lane) f.lane, f.lower_snapshot FROM competing_frontiers f
            WHERE f.processor_id = $1 ORDER BY f.lane, f.id DESC)
        SELECT EXISTS (SELECT 1 FROM %1$I c LEFT JOIN lanes l ON l.lane = c.priority
                       WHERE l.lane IS NULL  -- how far it was handed out is not known
                          OR NOT pg_visible_in_snapshot(c.transaction_id, l.lower_snapshot)
                          OR c.scheduled > clock_timestamp() - $2)
            OR EXISTS (SELECT 1 FROM competing_batches b JOIN %1$I c ON c.priority = b.lane
                       WHERE b.processor_id = $1
                         AND (c.transaction_id, c.position) > (b.after_transaction_id, b.after_position)
                         AND (c.transaction_id, c.position) <= (b.upto_transaction_id, b.upto_position)
                         AND pg_visible_in_snapshot(c.transaction_id, b.upper_snapshot)
                         AND NOT pg_visible_in_snapshot(c.transaction_id, b.lower_snapshot))
        $sql$;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    -- A snapshot from before a lock would not show what was stored since.
    IF v_queue IS NULL OR current_setting('transaction_isolation') <> 'read committed'
       OR NOT pg_try_advisory_xact_lock(hashtext('outbox rotate ' || current_schema() || ' ' || v_queue)) THEN
        RETURN v_done;
    END IF;
    EXECUTE format('SELECT last_value FROM %I', 'queue_' || v_queue || '_position') INTO v_last;
    FOR n IN 0..3 LOOP
        v_child := 'queue_' || v_queue || '_' || n;
        CONTINUE WHEN n = (v_last >> 40) & 3 OR pg_relation_size(v_child::regclass) = 0
            OR is_kept_for_snapshot(v_child);
        BEGIN
            EXECUTE format(v_busy, v_child) INTO v_needed USING p_processor_id, p_keep;
            CONTINUE WHEN v_needed;
            -- Now nobody is storing into it any more; what was stored since the first look is seen by the second.
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            EXECUTE format(v_busy, v_child) INTO v_needed USING p_processor_id, p_keep;
            EXECUTE format('SELECT count(*) || '' rows'' FROM %I', v_child) INTO v_mark;
            IF NOT v_needed AND may_empty(v_child, v_mark) THEN
                EXECUTE format('TRUNCATE %I', v_child);
                v_done := v_done || v_child;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    IF pg_relation_size(('queue_' || v_queue || '_' || ((v_last >> 40) & 3))::regclass) > p_segment_bytes
       AND pg_relation_size(('queue_' || v_queue || '_' || (((v_last >> 40) + 1) & 3))::regclass) = 0 THEN
        PERFORM setval(format('%I', 'queue_' || v_queue || '_position')::regclass, ((v_last >> 40) + 1) << 40);
    END IF;
    RETURN v_done;
END
$function$;
