-- Tables of mode Competing are emptied when no snapshot needs them.

CREATE OR REPLACE FUNCTION :"schema".holds_older_snapshot(
    p_seen_at timestamptz, p_seen_id bigint, p_settled interval DEFAULT '2 minutes') RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a dump of this database that holds a snapshot from before p_seen_at still be without its locks? p_seen_id: no transaction
-- up to it was open to begin then. Young is a session that began its transaction since, or whose snapshot has all those
-- behind it; of a standby, a replication slot, or a session that we may not look into, only the latter is known. A dump
-- locks every table right after it took its snapshot, and a lock stops TRUNCATE. So a session that has been in its
-- transaction for p_settled is no dump that has still to lock, unless it is called pg_dump.
SELECT EXISTS (
    SELECT 1 FROM pg_stat_activity a
    WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
      AND (a.datid IS NULL OR a.datname = current_database())
      AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
      AND age(a.backend_xmin) > age(p_seen_id::text::xid8::xid) AND coalesce(a.xact_start <= p_seen_at, true)
      AND (a.application_name LIKE 'pg_dump%' OR a.xact_start IS NULL OR a.xact_start > clock_timestamp() - p_settled))
    OR EXISTS (SELECT 1 FROM pg_replication_slots s WHERE age(s.xmin) > age(p_seen_id::text::xid8::xid))
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_kept_for_snapshot(p_child text) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Would may_empty say no, because of a snapshot? Asked before the table is locked, so that no transaction waits in vain.
SELECT EXISTS (SELECT 1 FROM emptyings e WHERE e.child = p_child AND holds_older_snapshot(e.seen_at, e.seen_id))
$function$;

CREATE OR REPLACE FUNCTION :"schema".may_empty(p_child text, p_mark text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a table in which nothing is needed any more be truncated? For a caller that has it locked, in READ COMMITTED. A transaction
-- with a snapshot from before must not read it afterwards: pg_dump takes its snapshot first and its locks later, and would find
-- the table empty beside others from when it was needed. So it is truncated at the third look at the earliest, when
-- each snapshot is younger than the second, and at the second each was younger than the first: also one that
-- was imported in between from a session that is gone. p_mark changes when anything was stored in it since.
DECLARE
    v_note emptyings;
BEGIN
    PERFORM pg_stat_clear_snapshot();
    SELECT e.* INTO v_note FROM emptyings e WHERE e.child = p_child;
    IF v_note.mark = p_mark AND holds_older_snapshot(v_note.seen_at, v_note.seen_id) THEN
        RETURN false;
    ELSIF v_note.mark = p_mark AND v_note.looks > 1 THEN
        DELETE FROM emptyings e WHERE e.child = p_child;
        RETURN true;
    END IF;
    INSERT INTO emptyings AS e (child, mark, looks, seen_at, seen_id)
    VALUES (p_child, p_mark, 1, clock_timestamp(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
    ON CONFLICT (child) DO UPDATE
    SET mark = excluded.mark, looks = CASE WHEN e.mark = excluded.mark THEN e.looks + 1 ELSE 1 END,
        seen_at = excluded.seen_at, seen_id = excluded.seen_id;
    RETURN false;
END
$function$;

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
    SELECT (s.last_value >> 9) & 3 INTO v_current FROM competing_dispatch_position_ids s;
    FOR n IN 0..3 LOOP
        v_child := 'competing_dispatch_positions_' || n;
        CONTINUE WHEN n = v_current OR pg_relation_size(v_child::regclass) = 0 OR is_kept_for_snapshot(v_child);
        BEGIN
            v_copied := 0;
            -- The dispatch position of a priority whose latest row lies here goes along, while no consumer hands out its batches.
            FOR v_row IN EXECUTE format('SELECT DISTINCT processor_id FROM %I', v_child) LOOP
                PERFORM 1 FROM competing_processors p WHERE p.processor_id = v_row.processor_id FOR UPDATE;
                EXECUTE format($sql$
                    INSERT INTO competing_dispatch_positions
                        (id, processor_id, priority, lower_snapshot, upper_snapshot, after_transaction_id, after_position,
                         stored_at)
                    SELECT nextval('competing_dispatch_position_ids'), l.* FROM (
                    SELECT DISTINCT ON (f.priority) f.processor_id, f.priority, f.lower_snapshot, f.upper_snapshot,
                           f.after_transaction_id, f.after_position, f.stored_at
                    FROM %I AS f
                    WHERE f.processor_id = $1 AND NOT EXISTS (
                        SELECT 1 FROM competing_dispatch_positions g
                        WHERE g.processor_id = $1 AND g.priority = f.priority AND g.id > f.id AND (g.id >> 9) & 3 <> %s)
                    ORDER BY f.priority, f.id DESC) AS l$sql$, v_child, n) USING v_row.processor_id;
                GET DIAGNOSTICS v_rows = ROW_COUNT;
                v_copied := v_copied + v_rows;
            END LOOP;
            CONTINUE WHEN v_copied > 0;  -- until the copies are committed these are needed
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            -- Meanwhile ids, ours or another's, may have come round to this child: then it holds the latest row of a priority.
            EXECUTE format($sql$
                SELECT EXISTS (SELECT 1 FROM %I AS f WHERE NOT EXISTS (
                    SELECT 1 FROM competing_dispatch_positions g
                    WHERE g.processor_id = f.processor_id AND g.priority = f.priority AND g.id > f.id AND (g.id >> 9) & 3 <> %s))
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
        WITH priorities AS MATERIALIZED (
            SELECT DISTINCT ON (f.priority) f.priority, f.lower_snapshot FROM competing_dispatch_positions f
            WHERE f.processor_id = $1 ORDER BY f.priority, f.id DESC)
        SELECT EXISTS (SELECT 1 FROM %1$I c LEFT JOIN priorities l ON l.priority = c.priority
                       WHERE l.priority IS NULL  -- how far it was handed out is not known
                          OR NOT pg_visible_in_snapshot(c.transaction_id, l.lower_snapshot)
                          OR c.scheduled BETWEEN clock_timestamp() - $2 AND clock_timestamp())
            OR EXISTS (SELECT 1 FROM competing_batches b JOIN %1$I c ON c.priority = b.priority
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
            -- Now no producer is storing into it any more; what was stored since the first look is seen by the second.
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
