-- Messages that fail starve no others: those that failed before and the others are taken apart, and all of a batch that fail leave it
-- in one statement. take_batch, defer_message and promote_delayed stay for workers that are older.

CREATE INDEX competing_retries_untried ON :"schema".competing_retries (processor_id, due_at) WHERE error_class IS NULL;

CREATE FUNCTION :"schema".index_untried() RETURNS void
LANGUAGE plpgsql SET search_path = :"schema", pg_temp
AS $function$
DECLARE
    v_queue text;
BEGIN
    FOR v_queue IN SELECT q.queue FROM queues q LOOP
        EXECUTE format('CREATE INDEX ON %I (deliver_after) WHERE last_error IS NULL', 'queue_' || v_queue || '_delayed');
    END LOOP;
END
$function$;
SELECT :"schema".index_untried();
DROP FUNCTION :"schema".index_untried();

CREATE OR REPLACE FUNCTION :"schema".take_waiting(
    p_processor_id text, p_claim_uid text, p_owner text, p_pod text, p_lease interval, p_limit int, p_failed boolean
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Work that is there already. p_failed: messages that failed before and whose next attempt is due, or a batch of such that was handed
-- back or whose lease is over; else a batch of others of which that is true, or messages whose time has come. Whoever dies over a
-- batch leaves it to be handled in smaller pieces, so that in the end the message that kills is alone and is counted.
DECLARE
    v_batch competing_batches;
    v_transaction_ids xid8[];
    v_positions bigint[];
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN;
    END IF;
    SELECT b.* INTO v_batch FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND (b.owner IS NULL OR b.expires_at <= clock_timestamp())
      AND (b.positions IS NOT NULL) = p_failed
    ORDER BY b.id LIMIT 1
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN QUERY
            UPDATE competing_batches b
            SET owner = p_owner, pod = p_pod, attempt = b.attempt + 1, expires_at = clock_timestamp() + p_lease,
                deaths = CASE WHEN b.owner IS NOT NULL AND b.piece = 1 THEN b.deaths + 1 ELSE b.deaths END,
                piece = CASE WHEN b.owner IS NULL THEN b.piece
                             ELSE greatest(1, coalesce(b.piece, b.messages) / 2) END
            WHERE b.processor_id = p_processor_id AND b.id = v_batch.id
            RETURNING b.*;
        RETURN;
    END IF;
    -- Two statements: each has an index of its own.
    IF p_failed THEN
        SELECT array_agg(d.transaction_id), array_agg(d.position) INTO v_transaction_ids, v_positions FROM (
            SELECT w.transaction_id, w.position FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= clock_timestamp() AND w.error_class IS NOT NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    ELSE
        SELECT array_agg(d.transaction_id), array_agg(d.position) INTO v_transaction_ids, v_positions FROM (
            SELECT w.transaction_id, w.position FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= clock_timestamp() AND w.error_class IS NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    END IF;
    IF v_positions IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
        WITH due AS (
            DELETE FROM competing_retries r USING unnest(v_transaction_ids, v_positions) AS d (t, p)
            WHERE r.processor_id = p_processor_id AND r.transaction_id = d.t AND r.position = d.p
            RETURNING r.transaction_id AS t, r.position AS p, r.attempts AS a
        )
        INSERT INTO competing_batches
            (id, processor_id, lane, owner, pod, expires_at, after_transaction_id, after_position,
             upto_transaction_id, upto_position, messages, transaction_ids, positions, attempts)
        SELECT nextval('competing_batch_ids'), p_processor_id, 0, p_owner, p_pod, clock_timestamp() + p_lease, '0', 0,
               (array_agg(t ORDER BY t DESC, p DESC))[1], (array_agg(p ORDER BY t DESC, p DESC))[1], count(*),
               array_agg(t ORDER BY t, p), array_agg(p ORDER BY t, p), array_agg(a ORDER BY t, p)
        FROM due HAVING count(*) > 0
        RETURNING *;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".defer_messages(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int, p_upto_transaction_id xid8, p_upto_position bigint,
    p_messages int, p_failed json
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages of a batch, up to the pair, are behind. Those in p_failed failed alone and leave the batch, to be tried again
-- ('Retry', in so many seconds), to be kept for a person ('DeadLetter') or to be forgotten ('Skip'); the others are done. False as
-- complete_batch(): nothing was done.
DECLARE
    v_queue text;
    v_lane int;
    v_copies competing_copies[];
BEGIN
    -- complete_batch() deletes them with what is behind.
    SELECT array_agg(c) INTO v_copies
    FROM json_to_recordset(p_failed) AS f (t xid8, p bigint, action text)
    JOIN competing_copies c ON c.processor_id = p_processor_id AND c.transaction_id = f.t AND c.position = f.p
    WHERE f.action = 'Retry';
    SELECT p.queue, b.lane INTO v_queue, v_lane FROM competing_batches b JOIN competing_processors p USING (processor_id)
    WHERE b.processor_id = p_processor_id AND b.id = p_batch;
    IF NOT complete_batch(p_processor_id, p_batch, p_owner, p_attempt, p_upto_transaction_id, p_upto_position, p_messages) THEN
        RETURN false;
    END IF;
    IF v_copies IS NOT NULL THEN
        INSERT INTO competing_copies SELECT c.* FROM unnest(v_copies) AS c;
    END IF;
    WITH failed AS MATERIALIZED (
        SELECT f.* FROM json_to_recordset(p_failed) AS f (
            t xid8, p bigint, action text, wait float8, attempts int, id text, type text, publication text, key text, data text,
            metadata text, scheduled timestamptz, error_class text, error text)
    ), dead AS (
        INSERT INTO dead_letters
            (processor_id, key, transaction_id, position, message_id, message_type, publication_id, partition_key,
             data, metadata, scheduled, attempts, error_class, error, priority)
        SELECT p_processor_id, coalesce(f.key, f.id), f.t, f.p, f.id, f.type, f.publication, f.key, f.data, f.metadata, f.scheduled,
               f.attempts, f.error_class, f.error, CASE WHEN v_queue IS NOT NULL THEN v_lane END
        FROM failed f WHERE f.action = 'DeadLetter' ORDER BY f.t, f.p
    ), passed_over AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, 0, f.t, f.p,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', f.id, f.type, coalesce(f.key, f.id), f.attempts,
                      f.error_class, f.error),
               'delivery.whenExhausted'
        FROM failed f WHERE f.action = 'Skip' ORDER BY f.t, f.p
    )
    INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, attempts, due_at, error_class, error)
    SELECT p_processor_id, f.t, f.p, f.id, f.attempts, clock_timestamp() + f.wait * interval '1 second', f.error_class, f.error
    FROM failed f WHERE f.action = 'Retry' AND v_queue IS NULL;
    IF v_queue IS NOT NULL THEN
        EXECUTE format($sql$
            INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled, priority,
                            deliver_after, attempts, last_error)
            SELECT f.id, f.type, f.publication, f.key, f.data::jsonb, f.metadata::jsonb, f.scheduled, $2,
                   clock_timestamp() + f.wait * interval '1 second', f.attempts, f.error_class || ': ' || f.error
            FROM json_to_recordset($1) AS f (
                t xid8, p bigint, action text, wait float8, attempts int, id text, type text, publication text, key text, data text,
                metadata text, scheduled timestamptz, error_class text, error text)
            WHERE f.action = 'Retry' ORDER BY f.t, f.p$sql$, 'queue_' || v_queue)
        USING p_failed, v_lane;
    END IF;
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
    -- Those that never failed are found however many are due again.
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after) WHERE last_error IS NULL', v_schema, v_table || '_delayed');
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

REVOKE EXECUTE ON FUNCTION
    :"schema".take_waiting(text, text, text, text, interval, int, boolean),
    :"schema".defer_messages(text, bigint, text, int, xid8, bigint, int, json),
    :"schema".promote_waiting(text, int, boolean)
FROM PUBLIC;
