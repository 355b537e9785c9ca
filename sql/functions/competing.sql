-- Mode Competing: batches handed out, completed, deferred and given back.

CREATE OR REPLACE FUNCTION :"schema".begin_competing(
    p_processor_id text, p_claim_uid text, p_queue text,
    p_lower pg_snapshot, p_after_transaction_id xid8, p_after_position bigint
) RETURNS TABLE (owned boolean, queue text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first consumer writes down where the processor starts; every other caller learns what was written. owned false: the claim is not
-- this resource's, or the processor has checkpoints of another mode.
#variable_conflict use_column
BEGIN
    owned := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid);
    begun := false;
    IF owned THEN
        INSERT INTO competing_processors (processor_id, queue) VALUES (p_processor_id, p_queue) ON CONFLICT DO NOTHING;
        begun := FOUND;
    END IF;
    IF begun THEN
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, 0, p_after_transaction_id, p_after_position) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'processor % has a checkpoint of another mode', p_processor_id
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Use another processorId.';
        END IF;
        INSERT INTO competing_dispatch_positions
            (id, processor_id, priority, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        SELECT nextval('competing_dispatch_position_ids'), p_processor_id, n, p_lower, pg_current_snapshot(), p_after_transaction_id, p_after_position
        FROM generate_series(0, CASE WHEN p_queue IS NULL THEN 0 ELSE 9 END) AS n;
    END IF;
    SELECT p.queue INTO queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".lock_dispatch_positions(p_processor_id text, p_claim_uid text) RETURNS TABLE (
    priority smallint, id bigint, lower_snapshot pg_snapshot, upper_snapshot pg_snapshot,
    after_transaction_id xid8, after_position bigint, now_snapshot pg_snapshot
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The right to hand out the next batch, to the end of the caller's transaction. No row: another consumer has the right, the claim is
-- not this resource's, or a repair is not finished: dispatch positions have old ids then, and messages new ones.
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM competing_processors p
    WHERE p.processor_id = p_processor_id
      AND EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- A statement of its own: its snapshot is younger than the lock.
    RETURN QUERY
        SELECT n.priority, f.id, f.lower_snapshot, f.upper_snapshot, f.after_transaction_id, f.after_position,
               pg_current_snapshot()
        FROM competing_processors p
        CROSS JOIN LATERAL generate_series(0, CASE WHEN p.queue IS NULL THEN 0 ELSE 9 END) AS s (priority)
        CROSS JOIN LATERAL (SELECT s.priority::smallint) AS n (priority)
        CROSS JOIN LATERAL (
            SELECT l.* FROM competing_dispatch_positions l
            WHERE l.processor_id = p_processor_id AND l.priority = n.priority
            ORDER BY l.id DESC LIMIT 1) AS f
        WHERE p.processor_id = p_processor_id
          AND NOT EXISTS (SELECT 1 FROM database_identity i WHERE i.repair_begun_at IS NOT NULL);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".claim_next(
    p_processor_id text, p_priority int, p_dispatch_position bigint, p_lower pg_snapshot, p_upper pg_snapshot,
    p_after_transaction_id xid8, p_after_position bigint, p_upto_transaction_id xid8, p_upto_position bigint,
    p_whole boolean, p_messages int, p_keys text[], p_delayed :"schema".competing_copies[],
    p_owner text, p_pod text, p_lease interval
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Hands out what was examined of a snapshot range, under the lock of lock_dispatch_positions(): the dispatch position moves on, and
-- the batch begins. Answers the batch's id; null: without messages only the dispatch position moves. p_whole: nothing is left of the
-- range. p_delayed: what the batch leaves out, because its time has not come: it is copied, and handed out when it has.
DECLARE
    v_queue text;
    v_batch bigint;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id FOR UPDATE;
    IF p_dispatch_position IS DISTINCT FROM (
        SELECT f.id FROM competing_dispatch_positions f
        WHERE f.processor_id = p_processor_id AND f.priority = p_priority ORDER BY f.id DESC LIMIT 1) THEN
        RAISE EXCEPTION 'the dispatch position of processor % has moved', p_processor_id USING ERRCODE = 'serialization_failure';
    END IF;
    IF p_whole THEN
        INSERT INTO competing_dispatch_positions (id, processor_id, priority, lower_snapshot)
        VALUES (nextval('competing_dispatch_position_ids'), p_processor_id, p_priority, p_upper);
    ELSE
        INSERT INTO competing_dispatch_positions
            (id, processor_id, priority, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        VALUES (nextval('competing_dispatch_position_ids'), p_processor_id, p_priority, p_lower, p_upper, p_upto_transaction_id, p_upto_position);
    END IF;
    IF p_keys IS NOT NULL AND v_queue IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I WHERE unique_key = ANY ($1)', 'queue_' || v_queue || '_keys') USING p_keys;
    END IF;
    IF cardinality(p_delayed) > 0 THEN
        INSERT INTO competing_copies SELECT d.* FROM unnest(p_delayed) AS d;
        INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, due_at)
        SELECT d.processor_id, d.transaction_id, d.position, d.message_id, coalesce(d.deliver_after, clock_timestamp())
        FROM unnest(p_delayed) AS d;
    END IF;
    IF p_messages > 0 THEN
        INSERT INTO competing_batches AS b
            (id, processor_id, priority, owner, pod, expires_at, lower_snapshot, upper_snapshot, after_transaction_id,
             after_position, upto_transaction_id, upto_position, messages, excluded)
        VALUES (nextval('competing_batch_ids'), p_processor_id, p_priority, p_owner, p_pod, clock_timestamp() + p_lease, p_lower,
                p_upper, p_after_transaction_id, p_after_position, p_upto_transaction_id, p_upto_position, p_messages,
                (SELECT array_agg(d.position) FROM unnest(p_delayed) AS d))
        RETURNING b.id INTO v_batch;
    END IF;
    RETURN v_batch;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".take_waiting(
    p_processor_id text, p_claim_uid text, p_owner text, p_pod text, p_lease interval, p_limit int, p_failed boolean
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A batch that was handed out before. p_failed: messages that failed before and whose next attempt is due, or a batch of such that
-- was handed back or whose lease is over; else a batch of others of which that is true, or messages whose time has come. A batch
-- whose consumer died is handled in smaller chunks, so that in the end a poison message is alone and its crashes are counted.
-- Nothing before a repair is finished.
DECLARE
    v_batch competing_batches;
    v_rows tid[];
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN;
    END IF;
    SELECT b.* INTO v_batch FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND (b.owner IS NULL OR b.expires_at <= clock_timestamp())
      AND b.failed = p_failed
    ORDER BY b.id LIMIT 1
    FOR UPDATE SKIP LOCKED;
    -- Only now: a repair that begins meanwhile locks the table, and waits for the end of this transaction.
    IF EXISTS (SELECT 1 FROM database_identity i WHERE i.repair_begun_at IS NOT NULL) THEN
        RETURN;
    END IF;
    IF v_batch.id IS NOT NULL THEN
        RETURN QUERY
            UPDATE competing_batches b
            SET owner = p_owner, pod = p_pod, attempt = b.attempt + 1, expires_at = clock_timestamp() + p_lease,
                crash_count = CASE WHEN b.owner IS NOT NULL AND b.chunk = 1 THEN b.crash_count + 1 ELSE b.crash_count END,
                chunk = CASE WHEN b.owner IS NULL THEN b.chunk
                             ELSE greatest(1, coalesce(b.chunk, b.messages) / 2) END
            WHERE b.processor_id = p_processor_id AND b.id = v_batch.id
            RETURNING b.*;
        RETURN;
    END IF;
    -- Two statements: each has an index of its own. A function that may change from row to row is no bound of an index scan: in a
    -- subselect it is called once.
    IF p_failed THEN
        SELECT array_agg(d.row_id) INTO v_rows FROM (
            SELECT w.ctid AS row_id FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= (SELECT clock_timestamp()) AND w.error_class IS NOT NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    ELSE
        SELECT array_agg(d.row_id) INTO v_rows FROM (
            SELECT w.ctid AS row_id FROM competing_retries w
            WHERE w.processor_id = p_processor_id AND w.due_at <= (SELECT clock_timestamp()) AND w.error_class IS NULL
            ORDER BY w.due_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS d;
    END IF;
    IF v_rows IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
        WITH due AS (
            -- They are locked, so no other transaction moves them.
            DELETE FROM competing_retries r WHERE r.ctid = ANY (v_rows)
            RETURNING r.transaction_id AS t, r.position AS p, r.attempts AS a
        )
        INSERT INTO competing_batches
            (id, processor_id, priority, owner, pod, expires_at, after_transaction_id, after_position,
             upto_transaction_id, upto_position, messages, transaction_ids, positions, attempts, failed)
        SELECT nextval('competing_batch_ids'), p_processor_id, 0, p_owner, p_pod, clock_timestamp() + p_lease, '0', 0,
               (array_agg(t ORDER BY t DESC, p DESC))[1], (array_agg(p ORDER BY t DESC, p DESC))[1], count(*),
               array_agg(t ORDER BY t, p), array_agg(p ORDER BY t, p), array_agg(a ORDER BY t, p), p_failed
        FROM due HAVING count(*) > 0
        RETURNING *;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".complete_batch(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int,
    p_upto_transaction_id xid8, p_upto_position bigint, p_messages int
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages, up to the pair, are done: all of the batch, or its beginning. False: it is not this owner's attempt any more; then
-- the caller rolls its effects back. From true to the caller's commit no consumer can take the batch over.
DECLARE
    v_done record;
BEGIN
    DELETE FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND b.id = p_batch AND b.owner = p_owner AND b.attempt = p_attempt
      AND (b.upto_transaction_id, b.upto_position) <= (p_upto_transaction_id, p_upto_position)
    RETURNING b.after_transaction_id AS t, b.after_position AS p, b.transaction_ids, b.positions INTO v_done;
    IF NOT FOUND THEN
        UPDATE competing_batches b
        SET after_transaction_id = p_upto_transaction_id, after_position = p_upto_position, crash_count = 0,
            messages = greatest(0, b.messages - p_messages),
            chunk = CASE WHEN b.chunk * 2 < b.messages - p_messages THEN b.chunk * 2 END
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

CREATE OR REPLACE FUNCTION :"schema".defer_messages(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int, p_upto_transaction_id xid8, p_upto_position bigint,
    p_messages int, p_failed json
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- So many messages of a batch, up to the pair, were tried. Those in p_failed failed alone and leave the batch, to be tried again
-- ('Retry', in so many seconds), to be kept for a user ('DeadLetter') or to be forgotten ('Skip'); the others are done. False as
-- complete_batch(): nothing was done.
DECLARE
    v_queue text;
    v_priority int;
    v_copies competing_copies[];
BEGIN
    -- complete_batch() deletes them with what was tried.
    SELECT array_agg(c) INTO v_copies
    FROM json_to_recordset(p_failed) AS f (t xid8, p bigint, action text)
    JOIN competing_copies c ON c.processor_id = p_processor_id AND c.transaction_id = f.t AND c.position = f.p
    WHERE f.action = 'Retry';
    SELECT p.queue, b.priority INTO v_queue, v_priority FROM competing_batches b JOIN competing_processors p USING (processor_id)
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
               f.attempts, f.error_class, f.error, CASE WHEN v_queue IS NOT NULL THEN v_priority END
        FROM failed f WHERE f.action = 'DeadLetter' ORDER BY f.t, f.p
    ), passed_over AS (
        INSERT INTO audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, 0, f.t, f.p,
               skip_reason(f.id, f.type, coalesce(f.key, f.id), f.attempts, f.error_class, f.error),
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
        USING p_failed, v_priority;
    END IF;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".renew_batches(
    p_processor_id text, p_owner text, p_lease interval, p_batch bigint DEFAULT NULL, p_attempt int DEFAULT NULL
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat of a consumer: how many batches are still its own. With a batch and its attempt: whether that one is.
DECLARE
    v_count int;
BEGIN
    UPDATE competing_batches b SET expires_at = clock_timestamp() + p_lease
    WHERE b.processor_id = p_processor_id AND b.owner = p_owner
      AND (p_batch IS NULL OR (b.id = p_batch AND b.attempt = p_attempt));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".hand_back_batches(p_processor_id text, p_owner text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A consumer leaves, or does not know whether its last commit was made: other consumers may take its batches at once, and no attempt
-- is used.
DECLARE
    v_count int;
BEGIN
    UPDATE competing_batches b SET owner = NULL, pod = NULL, expires_at = '-infinity'
    WHERE b.processor_id = p_processor_id AND b.owner = p_owner;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".redrive_competing(p_processor_id text, p_ids bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Dead letters of consumers: those of the outbox are handed out as messages whose time has come, those of a queue are stored in it anew,
-- with the message id, the priority and the age that they had, and their last error: they passed the filters that the processor had
-- then. No attempt is used yet. Their keys keep no order in this mode. A repair locks the processor's row to its end, and so is waited
-- for: it maps one table after the other, and would miss what moves from one to another meanwhile.
DECLARE
    v_queue text;
    v_count int;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id FOR KEY SHARE;
    IF v_queue IS NULL THEN
        WITH back AS (
            DELETE FROM dead_letters d WHERE d.processor_id = p_processor_id AND d.id = ANY (p_ids) RETURNING d.*
        ), kept AS (
            INSERT INTO competing_copies (processor_id, transaction_id, position, message_id, message_type, publication_id,
                                          partition_key, data, metadata, scheduled)
            SELECT b.processor_id, b.transaction_id, b.position, b.message_id, b.message_type, b.publication_id,
                   b.partition_key, b.data, b.metadata, b.scheduled
            FROM back b ON CONFLICT DO NOTHING
        )
        INSERT INTO competing_retries (processor_id, transaction_id, position, message_id, due_at, error_class, error)
        SELECT b.processor_id, b.transaction_id, b.position, b.message_id, clock_timestamp(), b.error_class, b.error
        FROM back b ON CONFLICT DO NOTHING;
    ELSE
        EXECUTE format($sql$
            WITH back AS (
                DELETE FROM dead_letters d WHERE d.processor_id = $1 AND d.id = ANY ($2) RETURNING d.*
            )
            INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled, priority,
                            last_error)
            SELECT b.message_id, b.message_type, b.publication_id, b.partition_key, b.data::jsonb, b.metadata::jsonb,
                   coalesce(b.scheduled, b.died_at), coalesce(b.priority, 5), b.error_class || ': ' || b.error
            FROM back b ORDER BY b.id$sql$, 'queue_' || v_queue)
        USING p_processor_id, p_ids;
    END IF;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;
