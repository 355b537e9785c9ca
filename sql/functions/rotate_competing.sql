CREATE OR REPLACE FUNCTION :"schema".rotate_competing() RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '100ms'
AS $function$
-- Empties children that hold nothing that is needed, in the caller's snapshot or any other transaction's (may_empty). Returns
-- their names. A table that another open transaction has read is left for the next time.
DECLARE
    v_done text[] := '{}';
    v_child text;
    v_current bigint;
    v_empty boolean;
    v_needed boolean;
    v_mark text;
    v_copied bigint;
    v_rows bigint;
    v_row record;
BEGIN
    -- A snapshot from before a lock would not show what was stored since.
    IF current_setting('transaction_isolation') <> 'read committed'
       OR NOT pg_try_advisory_xact_lock(hashtext('outbox rotate ' || current_schema())) THEN
        RETURN v_done;
    END IF;
    SELECT (s.last_value >> 10) & 3 INTO v_current FROM competing_batch_ids s;
    FOR n IN 0..3 LOOP
        v_child := 'competing_batches_' || n;
        CONTINUE WHEN n = v_current OR pg_relation_size(v_child::regclass) = 0 OR is_kept_for_snapshot(v_child);
        BEGIN
            EXECUTE format('SELECT NOT EXISTS (SELECT 1 FROM %I)', v_child) INTO v_empty;
            CONTINUE WHEN NOT v_empty;
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            EXECUTE format('SELECT NOT EXISTS (SELECT 1 FROM %I)', v_child) INTO v_empty;
            IF v_empty AND may_empty(v_child, 'empty') THEN
                EXECUTE format('TRUNCATE %I', v_child);
                v_done := v_done || v_child;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    SELECT (s.last_value >> 9) & 3 INTO v_current FROM competing_frontier_ids s;
    FOR n IN 0..3 LOOP
        v_child := 'competing_frontiers_' || n;
        CONTINUE WHEN n = v_current OR pg_relation_size(v_child::regclass) = 0 OR is_kept_for_snapshot(v_child);
        BEGIN
            v_copied := 0;
            -- A lane whose latest row lies here takes it along, while nobody hands out its batches.
            FOR v_row IN EXECUTE format('SELECT DISTINCT processor_id FROM %I', v_child) LOOP
                PERFORM 1 FROM competing_processors p WHERE p.processor_id = v_row.processor_id FOR UPDATE;
                EXECUTE format($sql$
                    INSERT INTO competing_frontiers
                        (id, processor_id, lane, lower_snapshot, upper_snapshot, after_transaction_id, after_position,
                         cut_at)
                    SELECT nextval('competing_frontier_ids'), l.* FROM (
                    SELECT DISTINCT ON (f.lane) f.processor_id, f.lane, f.lower_snapshot, f.upper_snapshot,
                           f.after_transaction_id, f.after_position, f.cut_at
                    FROM %I AS f
                    WHERE f.processor_id = $1 AND NOT EXISTS (
                        SELECT 1 FROM competing_frontiers g
                        WHERE g.processor_id = $1 AND g.lane = f.lane AND g.id > f.id AND (g.id >> 9) & 3 <> %s)
                    ORDER BY f.lane, f.id DESC) AS l$sql$, v_child, n) USING v_row.processor_id;
                GET DIAGNOSTICS v_rows = ROW_COUNT;
                v_copied := v_copied + v_rows;
            END LOOP;
            CONTINUE WHEN v_copied > 0;  -- until the copies are committed these are needed
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            -- Meanwhile ids, ours or another's, may have come round to this child: then it holds the latest row of a lane.
            EXECUTE format($sql$
                SELECT EXISTS (SELECT 1 FROM %I AS f WHERE NOT EXISTS (
                    SELECT 1 FROM competing_frontiers g
                    WHERE g.processor_id = f.processor_id AND g.lane = f.lane AND g.id > f.id AND (g.id >> 9) & 3 <> %s))
                $sql$, v_child, n) INTO v_needed;
            IF v_needed THEN
                RAISE EXCEPTION 'child % is in use again', v_child USING ERRCODE = 'lock_not_available';
            END IF;
            EXECUTE format('SELECT format(''%%s rows to %%s'', count(*), max(f.id)) FROM %I AS f', v_child) INTO v_mark;
            IF may_empty(v_child, v_mark) THEN
                EXECUTE format('TRUNCATE %I', v_child);
                v_done := v_done || v_child;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    RETURN v_done;
END
$function$;
