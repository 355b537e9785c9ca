-- Competing mode: batches of one processor handed out to any number of consumers, over the outbox or over a queue table.
-- No message row is ever changed. What changes often is inserted and deleted in children that are emptied by TRUNCATE in turn, so that
-- a snapshot that somebody holds for long does not make it slow or large.

CREATE TABLE :"schema".competing_processors (
    processor_id text        NOT NULL,
    queue        text,
    begun_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT competing_processors_pkey PRIMARY KEY (processor_id),
    -- a second one would find its messages emptied behind the first
    CONSTRAINT competing_processors_queue_has_one_processor UNIQUE (queue)
);

COMMENT ON TABLE :"schema".competing_processors IS
    'Processors in mode Competing, over the outbox or a queue. Never updated: whoever hands out the next batch locks the row.';

CREATE SEQUENCE :"schema".competing_frontier_ids;
CREATE TABLE :"schema".competing_frontiers (
    id                   bigint      NOT NULL,
    processor_id         text        NOT NULL,
    lane                 smallint    NOT NULL,
    lower_snapshot       pg_snapshot NOT NULL,
    upper_snapshot       pg_snapshot,
    after_transaction_id xid8        NOT NULL DEFAULT '0',
    after_position       bigint      NOT NULL DEFAULT 0,
    cut_at               timestamptz NOT NULL DEFAULT clock_timestamp()
) PARTITION BY LIST (((id >> 9) & 3));
CREATE INDEX competing_frontiers_latest ON :"schema".competing_frontiers (processor_id, lane, id);

COMMENT ON TABLE :"schema".competing_frontiers IS
    'How far batches were handed out, the latest row of a lane: what lower sees, and of what upper sees beyond it everything up to the pair.';

CREATE SEQUENCE :"schema".competing_batch_ids;
CREATE TABLE :"schema".competing_batches (
    id                   bigint      NOT NULL,
    processor_id         text        NOT NULL,
    lane                 smallint    NOT NULL,
    owner                text,
    pod                  text,
    attempt              int         NOT NULL DEFAULT 1,
    expires_at           timestamptz NOT NULL,
    lower_snapshot       pg_snapshot,
    upper_snapshot       pg_snapshot,
    after_transaction_id xid8        NOT NULL,
    after_position       bigint      NOT NULL,
    upto_transaction_id  xid8        NOT NULL,
    upto_position        bigint      NOT NULL,
    messages             int         NOT NULL,
    piece                int,
    deaths               int         NOT NULL DEFAULT 0,
    transaction_ids      xid8[],
    positions            bigint[],
    attempts             int[],
    aside                bigint[],
    cut_at               timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT competing_batches_is_a_window_or_a_list CHECK (
        (lower_snapshot IS NULL) = (upper_snapshot IS NULL) AND (lower_snapshot IS NULL) <> (positions IS NULL))
) PARTITION BY LIST (((id >> 10) & 3));
CREATE INDEX competing_batches_by_processor ON :"schema".competing_batches (processor_id, id);

COMMENT ON TABLE :"schema".competing_batches IS
    'Batches handed out and not done: which messages, whose, the number of the attempt, and until when without a heartbeat.';

CREATE TABLE :"schema".competing_frontiers_0 PARTITION OF :"schema".competing_frontiers FOR VALUES IN (0);
CREATE TABLE :"schema".competing_frontiers_1 PARTITION OF :"schema".competing_frontiers FOR VALUES IN (1);
CREATE TABLE :"schema".competing_frontiers_2 PARTITION OF :"schema".competing_frontiers FOR VALUES IN (2);
CREATE TABLE :"schema".competing_frontiers_3 PARTITION OF :"schema".competing_frontiers FOR VALUES IN (3);
CREATE TABLE :"schema".competing_batches_0 PARTITION OF :"schema".competing_batches FOR VALUES IN (0)
    WITH (fillfactor = 50);
CREATE TABLE :"schema".competing_batches_1 PARTITION OF :"schema".competing_batches FOR VALUES IN (1)
    WITH (fillfactor = 50);
CREATE TABLE :"schema".competing_batches_2 PARTITION OF :"schema".competing_batches FOR VALUES IN (2)
    WITH (fillfactor = 50);
CREATE TABLE :"schema".competing_batches_3 PARTITION OF :"schema".competing_batches FOR VALUES IN (3)
    WITH (fillfactor = 50);

CREATE TABLE :"schema".competing_retries (
    processor_id   text        NOT NULL,
    transaction_id xid8        NOT NULL,
    position       bigint      NOT NULL,
    message_id     text        NOT NULL,
    attempts       int         NOT NULL DEFAULT 0,
    due_at         timestamptz NOT NULL,
    error_class    text,
    error          text,
    written_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT competing_retries_pkey PRIMARY KEY (processor_id, transaction_id, position)
);
CREATE INDEX competing_retries_due ON :"schema".competing_retries (processor_id, due_at);

COMMENT ON TABLE :"schema".competing_retries IS
    'Messages of the outbox that failed in mode Competing, are delayed or were redriven, and when they are handed out. Of a queue they wait in its own table.';

CREATE TABLE :"schema".competing_copies (
    processor_id   text        NOT NULL,
    transaction_id xid8        NOT NULL,
    position       bigint      NOT NULL,
    message_id     text        NOT NULL,
    message_type   text        NOT NULL,
    publication_id text        NOT NULL,
    partition_key  text,
    data           text        NOT NULL,
    metadata       text,
    scheduled      timestamptz,
    deliver_after  timestamptz,
    CONSTRAINT competing_copies_pkey PRIMARY KEY (processor_id, transaction_id, position)
);

COMMENT ON TABLE :"schema".competing_copies IS
    'Delayed and redriven messages of the outbox: the checkpoint has passed them, so retention may have deleted the row that they are copies of.';

ALTER TABLE :"schema".dead_letters ADD COLUMN priority smallint;

CREATE TABLE :"schema".queues (
    queue      text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT queues_pkey PRIMARY KEY (queue),
    CONSTRAINT queues_queue_is_a_name CHECK (queue ~ '^[a-z][a-z0-9_]{0,39}$')
);

COMMENT ON TABLE :"schema".queues IS 'Queue tables: queue_NAME is the table of NAME, made by create_queue().';

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

CREATE OR REPLACE FUNCTION :"schema".keep_unique() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- While a message with this key is pending (nobody has taken it yet), a second one is not stored: as ON CONFLICT DO NOTHING, also in
-- that it waits for a transaction that is storing the same key. The same message may move from the delayed ones to the others.
DECLARE
    v_kept int;
BEGIN
    EXECUTE format('INSERT INTO %I AS k (unique_key, message_id) VALUES ($1, $2)
                    ON CONFLICT (unique_key) DO UPDATE SET message_id = k.message_id
                    WHERE k.message_id = EXCLUDED.message_id', TG_ARGV[0])
    USING NEW.unique_key, NEW.message_id;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN CASE WHEN v_kept = 1 THEN NEW END;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_competing(
    p_processor_id text, p_claim_uid text, p_queue text,
    p_lower pg_snapshot, p_after_transaction_id xid8, p_after_position bigint
) RETURNS TABLE (owned boolean, queue text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first consumer writes down where the processor starts; everybody else learns what was written. owned false: the claim is not this
-- resource's, or the processor has checkpoints of another mode.
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
        INSERT INTO competing_frontiers
            (id, processor_id, lane, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        SELECT nextval('competing_frontier_ids'), p_processor_id, n, p_lower, pg_current_snapshot(), p_after_transaction_id, p_after_position
        FROM generate_series(0, CASE WHEN p_queue IS NULL THEN 0 ELSE 9 END) AS n;
    END IF;
    SELECT p.queue INTO queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".take_batch(
    p_processor_id text, p_claim_uid text, p_owner text, p_pod text, p_lease interval, p_limit int
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Work that is there already: a batch handed back or whose lease is over, else messages whose next attempt is due. Whoever dies over a
-- batch leaves it to be handled in smaller pieces, so that in the end the message that kills is alone and is counted.
DECLARE
    v_batch competing_batches;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN;
    END IF;
    SELECT b.* INTO v_batch FROM competing_batches b
    WHERE b.processor_id = p_processor_id AND (b.owner IS NULL OR b.expires_at <= clock_timestamp())
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
    RETURN QUERY
        WITH due AS (
            DELETE FROM competing_retries r
            WHERE r.processor_id = p_processor_id AND (r.transaction_id, r.position) IN (
                SELECT w.transaction_id, w.position FROM competing_retries w
                WHERE w.processor_id = p_processor_id AND w.due_at <= clock_timestamp()
                ORDER BY w.due_at LIMIT p_limit
                FOR UPDATE SKIP LOCKED)
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

CREATE OR REPLACE FUNCTION :"schema".lock_frontier(p_processor_id text, p_claim_uid text) RETURNS TABLE (
    lane smallint, id bigint, lower_snapshot pg_snapshot, upper_snapshot pg_snapshot,
    after_transaction_id xid8, after_position bigint, now_snapshot pg_snapshot
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The right to hand out the next batch, to the end of the caller's transaction. No row: somebody else is at it, or the claim is not
-- this resource's.
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
        SELECT n.lane, f.id, f.lower_snapshot, f.upper_snapshot, f.after_transaction_id, f.after_position,
               pg_current_snapshot()
        FROM competing_processors p
        CROSS JOIN LATERAL generate_series(0, CASE WHEN p.queue IS NULL THEN 0 ELSE 9 END) AS s (lane)
        CROSS JOIN LATERAL (SELECT s.lane::smallint) AS n (lane)
        CROSS JOIN LATERAL (
            SELECT l.* FROM competing_frontiers l
            WHERE l.processor_id = p_processor_id AND l.lane = n.lane
            ORDER BY l.id DESC LIMIT 1) AS f
        WHERE p.processor_id = p_processor_id;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".cut_batch(
    p_processor_id text, p_lane int, p_frontier bigint, p_lower pg_snapshot, p_upper pg_snapshot,
    p_after_transaction_id xid8, p_after_position bigint, p_upto_transaction_id xid8, p_upto_position bigint,
    p_whole boolean, p_messages int, p_keys text[], p_delayed :"schema".competing_copies[],
    p_owner text, p_pod text, p_lease interval
) RETURNS SETOF :"schema".competing_batches
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Hands out what was examined of a window, under the lock of lock_frontier(): the frontier moves on, and the batch begins. Without
-- messages only the frontier moves. p_whole: nothing is left of the window. p_delayed: what the batch leaves out, because its time has
-- not come: it is copied, and handed out when it has.
DECLARE
    v_queue text;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id FOR UPDATE;
    IF p_frontier IS DISTINCT FROM (
        SELECT f.id FROM competing_frontiers f
        WHERE f.processor_id = p_processor_id AND f.lane = p_lane ORDER BY f.id DESC LIMIT 1) THEN
        RAISE EXCEPTION 'the frontier of processor % has moved', p_processor_id USING ERRCODE = 'serialization_failure';
    END IF;
    IF p_whole THEN
        INSERT INTO competing_frontiers (id, processor_id, lane, lower_snapshot)
        VALUES (nextval('competing_frontier_ids'), p_processor_id, p_lane, p_upper);
    ELSE
        INSERT INTO competing_frontiers
            (id, processor_id, lane, lower_snapshot, upper_snapshot, after_transaction_id, after_position)
        VALUES (nextval('competing_frontier_ids'), p_processor_id, p_lane, p_lower, p_upper, p_upto_transaction_id, p_upto_position);
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
    RETURN QUERY
        INSERT INTO competing_batches
            (id, processor_id, lane, owner, pod, expires_at, lower_snapshot, upper_snapshot, after_transaction_id,
             after_position, upto_transaction_id, upto_position, messages, aside)
        SELECT nextval('competing_batch_ids'), p_processor_id, p_lane, p_owner, p_pod, clock_timestamp() + p_lease, p_lower, p_upper,
               p_after_transaction_id, p_after_position, p_upto_transaction_id, p_upto_position, p_messages,
               (SELECT array_agg(d.position) FROM unnest(p_delayed) AS d)
        WHERE p_messages > 0
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
            messages = greatest(1, b.messages - p_messages),
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

CREATE OR REPLACE FUNCTION :"schema".defer_message(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int, p_action text, p_wait interval, p_attempts int,
    p_transaction_id xid8, p_position bigint, p_message_id text, p_message_type text, p_publication_id text,
    p_partition_key text, p_data jsonb, p_metadata jsonb, p_scheduled timestamptz, p_error_class text, p_error text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first message of what is left of a batch failed alone: it leaves the batch, to be tried again ('Retry'), to be kept for a person
-- ('DeadLetter') or to be forgotten ('Skip'). False as complete_batch(): nothing was done.
DECLARE
    v_queue text;
    v_lane int;
    v_copy competing_copies;
BEGIN
    SELECT c.* INTO v_copy FROM competing_copies c
    WHERE c.processor_id = p_processor_id AND c.transaction_id = p_transaction_id AND c.position = p_position;
    SELECT p.queue, b.lane INTO v_queue, v_lane FROM competing_batches b JOIN competing_processors p USING (processor_id)
    WHERE b.processor_id = p_processor_id AND b.id = p_batch;
    IF NOT complete_batch(p_processor_id, p_batch, p_owner, p_attempt, p_transaction_id, p_position, 1) THEN
        RETURN false;
    END IF;
    CASE p_action
        WHEN 'DeadLetter' THEN
            INSERT INTO dead_letters
                (processor_id, key, transaction_id, position, message_id, message_type, publication_id, partition_key,
                 data, metadata, scheduled, attempts, error_class, error, priority)
            VALUES (p_processor_id, coalesce(p_partition_key, p_message_id), p_transaction_id, p_position, p_message_id, p_message_type,
                    p_publication_id, p_partition_key, p_data, p_metadata, p_scheduled, p_attempts, p_error_class, p_error,
                    CASE WHEN v_queue IS NOT NULL THEN v_lane END);
        WHEN 'Skip' THEN
            INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            VALUES ('Skip', p_processor_id, 0, p_transaction_id, p_position,
                    format('message %s of type %s, key %s, after %s attempts: %s: %s', p_message_id, p_message_type,
                           coalesce(p_partition_key, p_message_id), p_attempts, p_error_class, p_error),
                    'delivery.whenExhausted');
        WHEN 'Retry' THEN
            IF v_queue IS NULL THEN
                INSERT INTO competing_retries
                    (processor_id, transaction_id, position, message_id, attempts, due_at, error_class, error)
                VALUES (p_processor_id, p_transaction_id, p_position, p_message_id, p_attempts,
                        clock_timestamp() + p_wait, p_error_class, p_error);
                IF v_copy.processor_id IS NOT NULL THEN
                    INSERT INTO competing_copies SELECT v_copy.*;
                END IF;
            ELSE
                EXECUTE format(
                    'INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled,
                                     priority, deliver_after, attempts, last_error)
                     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp() + $9, $10, $11)', 'queue_' || v_queue)
                USING p_message_id, p_message_type, p_publication_id, p_partition_key, p_data, p_metadata, p_scheduled,
                      v_lane, p_wait, p_attempts, p_error_class || ': ' || p_error;
            END IF;
    END CASE;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".redrive_competing(p_processor_id text, p_ids bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Dead letters of consumers: those of the outbox are handed out as messages whose time has come, those of a queue are stored in it anew,
-- with the message id, the priority and the age that they had. No attempt is used yet. Their keys keep no order in this mode.
DECLARE
    v_queue text;
    v_count int;
BEGIN
    SELECT p.queue INTO v_queue FROM competing_processors p WHERE p.processor_id = p_processor_id;
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
            INSERT INTO %I (message_id, message_type, publication_id, partition_key, data, metadata, scheduled, priority)
            SELECT b.message_id, b.message_type, b.publication_id, b.partition_key, b.data::jsonb, b.metadata::jsonb,
                   coalesce(b.scheduled, b.died_at), coalesce(b.priority, 5)
            FROM back b ORDER BY b.id$sql$, 'queue_' || v_queue)
        USING p_processor_id, p_ids;
    END IF;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
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
-- A consumer leaves, or does not know what became of its last commit: what it has not finished is anybody's at once, and no attempt is used.
DECLARE
    v_count int;
BEGIN
    UPDATE competing_batches b SET owner = NULL, pod = NULL, expires_at = '-infinity'
    WHERE b.processor_id = p_processor_id AND b.owner = p_owner;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$function$;

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

CREATE OR REPLACE FUNCTION :"schema".advance_competing_checkpoint(p_processor_id text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Stores the pair up to which everything is done: before the oldest batch that is not, the oldest message that waits for another
-- attempt, and what was not handed out. Of what it passed over there is a copy. It never moves back.
    WITH lanes AS (
        SELECT DISTINCT ON (f.lane) f.* FROM competing_frontiers f
        WHERE f.processor_id = p_processor_id ORDER BY f.lane, f.id DESC
    ), bounds AS (
        SELECT coalesce(l.upper_snapshot, l.lower_snapshot) AS seen, NULL::xid8 AS t, NULL::bigint AS p FROM lanes l
        UNION ALL
        SELECT l.lower_snapshot, l.after_transaction_id, l.after_position FROM lanes l WHERE l.upper_snapshot IS NOT NULL
        UNION ALL
        SELECT b.lower_snapshot, b.after_transaction_id, b.after_position
        FROM competing_batches b WHERE b.processor_id = p_processor_id AND b.positions IS NULL
        UNION ALL
        SELECT NULL, w.t, w.p - 1 FROM (
            SELECT l.t, l.p FROM competing_batches b CROSS JOIN LATERAL unnest(b.transaction_ids, b.positions) AS l (t, p)
            WHERE b.processor_id = p_processor_id AND b.positions IS NOT NULL
            UNION ALL
            SELECT r.transaction_id, r.position FROM competing_retries r WHERE r.processor_id = p_processor_id
        ) AS w
        WHERE NOT EXISTS (SELECT 1 FROM competing_copies c WHERE c.processor_id = p_processor_id
                          AND c.transaction_id = w.t AND c.position = w.p)
    ), pairs AS (
        SELECT (pg_snapshot_xmin(b.seen)::text::bigint - 1)::text::xid8 AS t, 9223372036854775807 AS p
        FROM bounds b WHERE b.t IS NULL OR b.t = '0'
        UNION ALL
        SELECT b.t, b.p FROM bounds b WHERE b.t <> '0'
    ), lowest AS (
        SELECT t, p FROM pairs ORDER BY t, p LIMIT 1
    )
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = lowest.t, last_processed_position = lowest.p, stored_at = clock_timestamp()
    FROM lowest
    WHERE c.processor_id = p_processor_id AND c.partition = 0
      AND (c.last_processed_transaction_id, c.last_processed_position) < (lowest.t, lowest.p)
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
    v_row record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('outbox rotate ' || current_schema())) THEN
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
        SELECT EXISTS (SELECT 1 FROM %1$I c JOIN lanes l ON l.lane = c.priority
                       WHERE NOT pg_visible_in_snapshot(c.transaction_id, l.lower_snapshot)
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
    IF v_queue IS NULL OR NOT pg_try_advisory_xact_lock(hashtext('outbox rotate ' || current_schema() || ' ' || v_queue)) THEN
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

REVOKE EXECUTE ON FUNCTION
    :"schema".create_queue(text),
    :"schema".keep_unique(),
    :"schema".begin_competing(text, text, text, pg_snapshot, xid8, bigint),
    :"schema".take_batch(text, text, text, text, interval, int),
    :"schema".lock_frontier(text, text),
    :"schema".cut_batch(text, int, bigint, pg_snapshot, pg_snapshot, xid8, bigint, xid8, bigint, boolean, int, text[], :"schema".competing_copies[], text, text, interval),
    :"schema".complete_batch(text, bigint, text, int, xid8, bigint, int),
    :"schema".defer_message(text, bigint, text, int, text, interval, int, xid8, bigint, text, text, text, text, jsonb, jsonb, timestamptz, text, text),
    :"schema".redrive_competing(text, bigint[]),
    :"schema".renew_batches(text, text, interval, bigint, int),
    :"schema".hand_back_batches(text, text),
    :"schema".promote_delayed(text, int),
    :"schema".advance_competing_checkpoint(text),
    :"schema".rotate_competing(),
    :"schema".rotate_queue(text, interval, bigint)
FROM PUBLIC;
