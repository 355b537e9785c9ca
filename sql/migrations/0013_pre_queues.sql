-- Queues: a retry stores nothing and a producer holds up no consumer; what is in use again is not emptied; a batch ends behind its last message.

CREATE OR REPLACE FUNCTION :"schema".complete_batch(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int,
    p_upto_transaction_id xid8, p_upto_position bigint, p_messages int
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages, up to the pair, are done: all of the batch, or its beginning. False: it is not this owner's attempt any more; then
-- the caller rolls its effects back. From true to the caller's commit nobody can take the batch over.
DECLARE
    v_done record;
BEGIN
    DELETE FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND b.id = p_batch AND b.owner = p_owner AND b.attempt = p_attempt
      AND (b.upto_transaction_id, b.upto_position) <= (p_upto_transaction_id, p_upto_position)
    RETURNING b.after_transaction_id AS t, b.after_position AS p, b.transaction_ids, b.positions INTO v_done;
    IF NOT FOUND THEN
        UPDATE competing_batches b
        SET after_transaction_id = p_upto_transaction_id, after_position = p_upto_position, deaths = 0,
            messages = greatest(0, b.messages - p_messages),
            piece = CASE WHEN b.piece * 2 < b.messages - p_messages THEN b.piece * 2 END
        FROM competing_batches was
        WHERE was.processor_id = p_processor_id AND was.id = p_batch
          AND b.processor_id = p_processor_id AND b.id = p_batch AND b.owner = p_owner AND b.attempt = p_attempt
          AND (b.after_transaction_id, b.after_position) < (p_upto_transaction_id, p_upto_position)
        RETURNING was.after_transaction_id AS t, was.after_position AS p, b.transaction_ids, b.positions INTO v_done;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    IF v_done.positions IS NOT NULL THEN
        -- Of these messages only: one that left the batch before has its copy anew.
        DELETE FROM competing_copies c
        USING unnest(v_done.transaction_ids, v_done.positions) AS l (t, p)
        WHERE c.processor_id = p_processor_id AND c.transaction_id = l.t AND c.position = l.p
          AND (l.t, l.p) > (v_done.t, v_done.p) AND (l.t, l.p) <= (p_upto_transaction_id, p_upto_position);
    END IF;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".rotate_competing() RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '100ms'
AS $function$
-- Empties children that hold nothing any more but dead rows, however old the snapshots that others hold. Returns their names. A table
-- that somebody has read in an open transaction is left for the next time.
DECLARE
    v_done text[] := '{}';
    v_child text;
    v_current bigint;
    v_empty boolean;
    v_needed boolean;
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
        CONTINUE WHEN n = v_current OR pg_relation_size(v_child::regclass) = 0;
        BEGIN
            EXECUTE format('SELECT NOT EXISTS (SELECT 1 FROM %I)', v_child) INTO v_empty;
            CONTINUE WHEN NOT v_empty;
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            EXECUTE format('SELECT NOT EXISTS (SELECT 1 FROM %I)', v_child) INTO v_empty;
            IF v_empty THEN
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
        CONTINUE WHEN n = v_current OR pg_relation_size(v_child::regclass) = 0;
        BEGIN
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
            END LOOP;
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
            EXECUTE format('TRUNCATE %I', v_child);
            v_done := v_done || v_child;
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
-- Empties a segment of the processor's queue in which everything is done and older than p_keep; once the one that is written to is
-- larger than p_segment_bytes, producers go on in the next empty one. Returns the segments emptied.
DECLARE
    v_done text[] := '{}';
    v_queue text;
    v_last bigint;
    v_child text;
    v_needed boolean;
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
        CONTINUE WHEN n = (v_last >> 40) & 3 OR pg_relation_size(v_child::regclass) = 0;
        BEGIN
            EXECUTE format(v_busy, v_child) INTO v_needed USING p_processor_id, p_keep;
            CONTINUE WHEN v_needed;
            -- Now nobody is storing into it any more; what was stored since the first look is seen by the second.
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_child);
            EXECUTE format(v_busy, v_child) INTO v_needed USING p_processor_id, p_keep;
            IF NOT v_needed THEN
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

CREATE OR REPLACE FUNCTION :"schema".keep_unique() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- While a message with this key is pending (nobody has taken it yet), a second one is not stored, whatever its id: as ON CONFLICT DO
-- NOTHING, also in that it waits for a transaction that is storing the same key. The key of the one that is pending is not locked:
-- whoever takes that one deletes the key, and must not wait for a producer. promote_delayed frees a key before it comes here.
DECLARE
    v_kept int;
BEGIN
    EXECUTE format('INSERT INTO %I (unique_key, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING', TG_ARGV[0])
    USING NEW.unique_key, NEW.message_id;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN CASE WHEN v_kept = 1 THEN NEW END;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".promote_delayed(p_queue text, p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Moves messages whose time has come to those that are handed out, as newly stored ones. Their unique keys are freed first, for
-- keep_unique takes them again as each is stored; who stores the same key meanwhile waits, and then finds it taken. A message whose
-- key was not freed, because another one has it (an UPDATE by hand; two with one id and key, which were stored before this was
-- refused), goes on without: keep_unique would drop it.
DECLARE
    v_count int;
BEGIN
    EXECUTE format($sql$
        WITH due AS (
            DELETE FROM %1$I WHERE ctid = ANY (ARRAY(
                SELECT w.ctid FROM %1$I AS w WHERE w.deliver_after <= clock_timestamp()
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
        ORDER BY d.deliver_after$sql$, 'queue_' || p_queue || '_delayed', 'queue_' || p_queue, 'queue_' || p_queue || '_keys')
    USING p_limit;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
