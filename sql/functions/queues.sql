-- Queues and retries of mode Competing: made, promoted when they are due, and how far all is done.

CREATE OR REPLACE FUNCTION :"schema".create_queue(p_queue text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Makes the table queue_NAME; false: it was there. The high bits of a position say in which of four segments a
-- message lies: moving the sequence on moves producers to the next one, and costs them nothing.
DECLARE
    v_schema text := current_schema();
    v_table text := 'queue_' || p_queue;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox queue ' || v_schema || ' ' || p_queue));
    INSERT INTO queues (queue) VALUES (p_queue) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE SEQUENCE %I.%I', v_schema, v_table || '_position');
    EXECUTE format($ddl$
        CREATE TABLE %1$I.%2$I (
            position       bigint      NOT NULL DEFAULT nextval(%3$L),
            transaction_id xid8        NOT NULL DEFAULT pg_current_xact_id(),
            publication_id text        NOT NULL DEFAULT 'default',
            partition_key  text,
            message_id     text        NOT NULL DEFAULT gen_random_uuid()::text,
            message_type   text        NOT NULL,
            data           jsonb       NOT NULL,
            metadata       jsonb,
            scheduled      timestamptz NOT NULL DEFAULT clock_timestamp(),
            priority       smallint    NOT NULL DEFAULT 5 CHECK (priority BETWEEN 0 AND 9),
            deliver_after  timestamptz,
            unique_key     text        CHECK (octet_length(unique_key) <= 1024),
            attempts       int         NOT NULL DEFAULT 0,
            last_error     text
        ) PARTITION BY LIST ((CASE WHEN deliver_after IS NULL THEN (position >> 40) & 3 ELSE -1 END))
        $ddl$, v_schema, v_table, format('%I.%I', v_schema, v_table || '_position'));
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)',
                       v_schema, v_table || '_' || n, v_table, n);
        EXECUTE format('CREATE INDEX ON %I.%I (priority, transaction_id, position)', v_schema, v_table || '_' || n);
    END LOOP;
    EXECUTE format('CREATE TABLE %I.%I PARTITION OF %1$I.%3$I FOR VALUES IN (-1)',
                   v_schema, v_table || '_delayed', v_table);
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after)', v_schema, v_table || '_delayed');
    -- Those that never failed are found however many are due again, and the other way round.
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after) WHERE last_error IS NULL', v_schema, v_table || '_delayed');
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after) WHERE last_error IS NOT NULL', v_schema, v_table || '_delayed');
    EXECUTE format('CREATE TABLE %I.%I (unique_key text NOT NULL PRIMARY KEY, message_id text NOT NULL)',
                   v_schema, v_table || '_keys');
    EXECUTE format('CREATE TRIGGER unique_while_pending BEFORE INSERT ON %I.%I FOR EACH ROW
                    WHEN (NEW.unique_key IS NOT NULL) EXECUTE FUNCTION %1$I.keep_unique(%3$L)',
                   v_schema, v_table, v_table || '_keys');
    EXECUTE format('COMMENT ON TABLE %I.%I IS %L', v_schema, v_table,
                   'A queue: messages inserted by producers, handled once each by one of the consumers that compete for them.');
    RETURN true;
END
$function$;

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
                SELECT w.ctid FROM %1$I AS w WHERE w.deliver_after <= (SELECT clock_timestamp()) AND w.last_error IS %4$s
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

CREATE OR REPLACE FUNCTION :"schema".advance_competing_checkpoint(p_processor_id text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Stores the pair up to which everything is done: before the oldest batch that is not, the oldest message that waits for another
-- attempt, and what was not handed out. Of what it passed over there is a copy. It never moves back.
DECLARE
    -- So many messages with a copy it passes at most: this is called every two seconds, between two heartbeats.
    v_most CONSTANT int := 10000;
    v_queue text;
    v_idle smallint[] := '{}';
    v_seen bigint;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    IF v_queue IS NOT NULL THEN
        -- The dispatch position of a priority of which nothing waits stays where it last had a message, or at the processor's start.
        -- What is stored of it from now on comes behind every dispatch position that there is now: one statement, so that now is the
        -- same for all.
        EXECUTE format($sql$
            SELECT coalesce(array_agg(l.priority) FILTER (WHERE l.upper_snapshot IS NULL AND head.position IS NULL), '{}'),
                   max(pg_snapshot_xmin(coalesce(l.upper_snapshot, l.lower_snapshot))::text::bigint)
            FROM (
                SELECT DISTINCT ON (f.priority) f.* FROM competing_dispatch_positions f
                WHERE f.processor_id = $1 ORDER BY f.priority, f.id DESC) AS l
            LEFT JOIN LATERAL (
                (SELECT o.position FROM %1$I o
                 WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')
                   AND o.priority = l.priority AND o.transaction_id >= pg_snapshot_xmax(l.lower_snapshot)
                 ORDER BY o.transaction_id, o.position LIMIT 1)
                UNION ALL
                (SELECT late.position FROM pg_snapshot_xip(l.lower_snapshot) AS x (id) CROSS JOIN LATERAL (
                     SELECT o.position FROM %1$I o
                     WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = ANY ('{0,1,2,3}')
                       AND o.priority = l.priority AND o.transaction_id = x.id
                     ORDER BY o.position LIMIT 1) AS late LIMIT 1)
            ) AS head ON true$sql$, 'queue_' || v_queue)
        INTO v_idle, v_seen USING p_processor_id;
    END IF;
    WITH priorities AS (
        SELECT DISTINCT ON (f.priority) f.* FROM competing_dispatch_positions f
        WHERE f.processor_id = p_processor_id AND f.priority <> ALL (v_idle) ORDER BY f.priority, f.id DESC
    ), bounds AS (
        SELECT coalesce(l.upper_snapshot, l.lower_snapshot) AS seen, NULL::xid8 AS t, NULL::bigint AS p FROM priorities l
        UNION ALL
        SELECT l.lower_snapshot, l.after_transaction_id, l.after_position FROM priorities l WHERE l.upper_snapshot IS NOT NULL
        UNION ALL
        SELECT b.lower_snapshot, b.after_transaction_id, b.after_position
        FROM competing_batches b WHERE b.processor_id = p_processor_id AND b.positions IS NULL
        UNION ALL
        SELECT NULL, l.t, l.p - 1
        FROM competing_batches b CROSS JOIN LATERAL unnest(b.transaction_ids, b.positions) AS l (t, p)
        WHERE b.processor_id = p_processor_id AND b.positions IS NOT NULL
          AND (SELECT c.position FROM competing_copies c
               WHERE c.processor_id = p_processor_id AND c.transaction_id = l.t AND c.position = l.p) IS NULL
    ), pairs AS (
        SELECT (pg_snapshot_xmin(b.seen)::text::bigint - 1)::text::xid8 AS t, 9223372036854775807 AS p
        FROM bounds b WHERE b.t IS NULL OR b.t = '0'
        UNION ALL
        SELECT b.t, b.p FROM bounds b WHERE b.t <> '0'
        UNION ALL
        SELECT (v_seen - 1)::text::xid8, 9223372036854775807 WHERE v_seen IS NOT NULL
    ), lowest AS (
        SELECT t, p FROM pairs ORDER BY t, p LIMIT 1
    ), waiting AS (
        -- Behind the stored pair, for what it has passed has a copy; a subselect for each, so that no plan reads all copies.
        SELECT r.transaction_id AS t, r.position AS p, row_number() OVER (ORDER BY r.transaction_id, r.position) AS n,
               (SELECT c.position FROM competing_copies c
                WHERE c.processor_id = p_processor_id AND c.transaction_id = r.transaction_id AND c.position = r.position) AS copy
        FROM competing_retries r
        WHERE r.processor_id = p_processor_id AND (r.transaction_id, r.position) <= (SELECT l.t, l.p FROM lowest l)
          AND (r.transaction_id, r.position) > (SELECT c.last_processed_transaction_id, c.last_processed_position
                                                FROM processor_checkpoints c
                                                WHERE c.processor_id = p_processor_id AND c.partition = 0)
        ORDER BY r.transaction_id, r.position LIMIT v_most
    ), reached AS (
        SELECT e.t, e.p FROM (
            (SELECT w.t, w.p - (w.copy IS NULL)::int AS p FROM waiting w WHERE w.copy IS NULL OR w.n = v_most
             ORDER BY w.t, w.p LIMIT 1)
            UNION ALL
            SELECT l.t, l.p FROM lowest l) AS e
        ORDER BY e.t, e.p LIMIT 1
    )
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = reached.t, last_processed_position = reached.p, stored_at = clock_timestamp()
    FROM reached
    WHERE c.processor_id = p_processor_id AND c.partition = 0
      AND (c.last_processed_transaction_id, c.last_processed_position) < (reached.t, reached.p);
END
$function$;
