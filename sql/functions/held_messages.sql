-- Held messages and dead letters: held, tried again, given up, and decided by a user.

CREATE OR REPLACE FUNCTION :"schema".lock_partition(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A caller that changes held messages or dead letters and is not the owner waits for the owner's open transaction and keeps
-- the next one waiting: one transaction at a time changes which message waits behind which.
BEGIN
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition FOR UPDATE;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_key_blocked(
    p_processor_id text, p_partition int, p_key text, p_before bigint
) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Must a message of this key wait: is one held before place `p_before` that blocks it, or dead and undecided?
    SELECT EXISTS (SELECT 1 FROM held_messages h
                   WHERE h.processor_id = p_processor_id AND h.partition = p_partition
                     AND h.key_hash = hashtextextended(p_key, 0) AND h.key = p_key AND h.blocks AND h.place < p_before)
        OR EXISTS (SELECT 1 FROM dead_letters d
                   WHERE d.processor_id = p_processor_id AND d.partition = p_partition
                     AND d.key_hash = hashtextextended(p_key, 0) AND d.key = p_key AND d.blocks)
$function$;

CREATE OR REPLACE FUNCTION :"schema".advance_keys(p_processor_id text, p_partition int, p_keys text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Something of these keys was handled, dropped or skipped: the first that waits behind it is due, unless a dead letter
-- still blocks the key. One look for each key, however many wait. Here and below one message after the other: for a join
-- the planner may read all that is held for each of them, since it takes a table that was never analysed for small.
DECLARE
    v_key text;
BEGIN
    FOR v_key IN SELECT DISTINCT k FROM unnest(p_keys) AS k LOOP
        UPDATE held_messages h SET behind = false, next_attempt_at = clock_timestamp()
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.behind
          AND h.place = (SELECT f.place FROM held_messages f
                         WHERE f.processor_id = p_processor_id AND f.partition = p_partition
                           AND f.key_hash = hashtextextended(v_key, 0) AND f.key = v_key AND f.blocks
                         ORDER BY f.place LIMIT 1)
          AND NOT EXISTS (SELECT 1 FROM dead_letters d
                          WHERE d.processor_id = p_processor_id AND d.partition = p_partition
                            AND d.key_hash = hashtextextended(v_key, 0) AND d.key = v_key AND d.blocks);
    END LOOP;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".skip_reason(
    p_message_id text, p_message_type text, p_key text, p_attempts int, p_error_class text, p_error text
) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What audit_log says of a message that is skipped because its attempts ran out.
    SELECT format('message %s of type %s, key %s, after %s attempt%s: %s: %s', p_message_id, p_message_type, p_key,
                  p_attempts, CASE WHEN p_attempts <> 1 THEN 's' END, p_error_class, p_error)
$function$;

CREATE OR REPLACE FUNCTION :"schema".hold_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_decisions jsonb
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint that passes them: keep messages that are not handled now, in reading order. Those
-- with a decision (t, p: the pair; attempts; class; error; wait in seconds, null: until a user says so; blocks) failed
-- and become what its `action` says (Hold, DeadLetter, Skip); the others wait, behind a message of their key or until
-- `next_attempt_at`. What became due since it was read waits behind what blocks its key here; a dead letter that is written
-- here blocks its key if its decision says so. What is held already was read again after a rewind: it goes behind those of its
-- key that were read again before it. -1: not the owner. Else how many are held.
DECLARE
    v_now timestamptz := clock_timestamp();
    v_kept int;
    v_again text[];
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    INSERT INTO dead_letters (processor_id, partition, key, transaction_id, position, message_id, message_type,
                              publication_id, partition_key, data, metadata, scheduled, attempts, error_class, error,
                              blocks, place)
    SELECT p_processor_id, p_partition, r.key, r.transaction_id, r.position, r.message_id, r.message_type,
           r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled, v.attempts, v.class, v.error, v.blocks,
           nextval('held_order')
    FROM unnest(p_rows) WITH ORDINALITY AS r
    JOIN jsonb_to_recordset(p_decisions) AS v (t xid8, p bigint, action text, attempts int, class text, error text,
                                              blocks boolean) ON (v.t, v.p) = (r.transaction_id, r.position)
    WHERE v.action = 'DeadLetter' ORDER BY r.ordinality;
    INSERT INTO audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
    SELECT 'Skip', p_processor_id, p_partition, r.transaction_id, r.position,
           skip_reason(r.message_id, r.message_type, r.key, v.attempts, v.class, v.error),
           'delivery.whenExhausted'
    FROM unnest(p_rows) WITH ORDINALITY AS r
    JOIN jsonb_to_recordset(p_decisions) AS v (t xid8, p bigint, action text, attempts int, class text, error text)
        ON (v.t, v.p) = (r.transaction_id, r.position)
    WHERE v.action = 'Skip' ORDER BY r.ordinality;
    WITH kept AS (
        INSERT INTO held_messages AS h (processor_id, partition, key, place, transaction_id, position, message_id, message_type,
                                        publication_id, partition_key, data, metadata, scheduled, blocks, behind, attempts,
                                        error_class, error, next_attempt_at)
        SELECT p_processor_id, p_partition, r.key, nextval('held_order'), r.transaction_id, r.position, r.message_id,
               r.message_type, r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled,
               CASE WHEN r.action IS NOT NULL THEN r.blocking ELSE NOT r.delayed END,
               r.action IS NULL AND NOT r.delayed
                   AND (r.before OR is_key_blocked(p_processor_id, p_partition, r.key, 9223372036854775807)),
               coalesce(r.failures, 0), r.class, r.failure,
               CASE WHEN r.action IS NOT NULL THEN coalesce(v_now + make_interval(secs => r.wait), 'infinity')
                    WHEN r.delayed THEN r.next_attempt_at ELSE v_now END
        FROM (SELECT d.*, coalesce(bool_or(CASE WHEN d.action IS NULL THEN NOT d.delayed
                                                ELSE d.action = 'Hold' AND d.blocking END)
                                   OVER (PARTITION BY d.key ORDER BY d.ordinality
                                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS before
              FROM (SELECT u.*, v.action, v.attempts AS failures, v.class, v.error AS failure, v.wait, v.blocks AS blocking,
                           v.action IS NULL AND coalesce(u.next_attempt_at > v_now, false) AS delayed
                    FROM unnest(p_rows) WITH ORDINALITY AS u
                    LEFT JOIN jsonb_to_recordset(p_decisions) AS v (
                        t xid8, p bigint, action text, attempts int, class text, error text, wait double precision,
                        blocks boolean) ON (v.t, v.p) = (u.transaction_id, u.position)) AS d) AS r
        WHERE r.action IS NULL OR r.action = 'Hold'
        ORDER BY r.ordinality
        ON CONFLICT (transaction_id, position, processor_id, partition) DO UPDATE
        SET place = excluded.place, behind = h.blocks
        RETURNING h.key, h.xmax <> '0' AS again
    )
    SELECT count(*), array_agg(k.key) FILTER (WHERE k.again) INTO v_kept, v_again FROM kept k;
    PERFORM advance_keys(p_processor_id, p_partition, v_again);
    RETURN v_kept;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".take_due_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_limit int, p_payload boolean
) RETURNS TABLE (
    owned boolean, next_in double precision, blocking boolean, transaction_id xid8, "position" bigint, key text,
    message_id text, message_type text, publication_id text, partition_key text, data text, metadata text,
    scheduled timestamptz, attempts int, crash_count int
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The held messages to be tried now, in order of their keys, and written down as begun: should the process die of one,
-- the next owner knows. A message that a process died of comes alone. Always one row at least; without a message it says in
-- how many seconds there is one (null: never by itself), and whether later messages of some key must wait.
#variable_conflict use_column
DECLARE
    v_heads bigint[];
    v_free bigint[];
    v_places bigint[];
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF NOT owned THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- A delayed one that is due takes its place: behind all that is held of its key by now, if something blocks that. One of
    -- several that a user had tried again keeps its place: behind the first of its key. However many are due, as many are
    -- looked at as may be taken, and the next ones only where all of those have to wait.
    LOOP
        v_heads := ARRAY(
            SELECT h.place FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
              AND h.next_attempt_at <= (SELECT clock_timestamp())  -- called once: else it is no bound of the index scan
            ORDER BY h.next_attempt_at, h.place LIMIT p_limit);
        WITH waiting AS MATERIALIZED (
            SELECT d.place, CASE WHEN d.blocks THEN d.place ELSE nextval('held_order') END AS later
            FROM (SELECT h.place, h.blocks FROM held_messages h
                  WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_heads)
                    AND h.attempts = 0
                    AND CASE WHEN h.blocks
                             THEN EXISTS (SELECT 1 FROM held_messages f
                                          WHERE f.processor_id = p_processor_id AND f.partition = p_partition
                                            AND f.key_hash = h.key_hash AND f.key = h.key AND f.blocks AND NOT f.behind
                                            AND f.place < h.place)
                             ELSE is_key_blocked(p_processor_id, p_partition, h.key, 9223372036854775807) END
                  ORDER BY h.next_attempt_at, h.place) AS d
        ), moved AS (
            UPDATE held_messages h SET behind = true, blocks = true, place = w.later FROM waiting w
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = w.place
            RETURNING w.place
        )
        SELECT ARRAY(SELECT unnest(v_heads) EXCEPT SELECT m.place FROM moved m) INTO v_free;
        EXIT WHEN v_free <> '{}' OR v_heads = '{}';
    END LOOP;
    WITH heads AS MATERIALIZED (
        SELECT h.place, h.key, h.key_hash, h.attempts, h.crash_count, h.blocks, h.next_attempt_at FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_free)
    ), chosen AS (
        SELECT h.place, false AS follows FROM heads h WHERE NOT EXISTS (SELECT 1 FROM heads s WHERE s.crash_count > 0)
        UNION ALL
        SELECT f.place, true FROM heads h
        CROSS JOIN LATERAL (
            -- Up to the first that is not to be tried with others: none of its key overtakes it.
            SELECT n.place, bool_and(n.behind AND n.crash_count = 0) OVER (ORDER BY n.place) AS free
            FROM (SELECT b.place, b.behind, b.crash_count FROM held_messages b
                  WHERE b.processor_id = p_processor_id AND b.partition = p_partition AND b.key_hash = h.key_hash
                    AND b.key = h.key AND b.blocks AND b.place > h.place
                  ORDER BY b.place LIMIT p_limit / greatest(1, cardinality(v_free))) AS n) AS f
        WHERE f.free AND h.attempts = 0 AND h.blocks AND NOT EXISTS (SELECT 1 FROM heads s WHERE s.crash_count > 0)
          AND NOT is_key_blocked(p_processor_id, p_partition, h.key, h.place)
        UNION ALL
        (SELECT s.place, false FROM heads s WHERE s.crash_count > 0 ORDER BY s.next_attempt_at, s.place LIMIT 1)
    )
    -- What is due comes first: else those behind one key could take all the room, and the other keys would wait for them.
    SELECT array_agg(c.place) INTO v_places FROM (SELECT place FROM chosen ORDER BY follows, place LIMIT p_limit) AS c;
    IF v_places IS NULL THEN
        SELECT extract(epoch FROM min(h.next_attempt_at) - clock_timestamp()) INTO next_in FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
          AND h.next_attempt_at < 'infinity';
        blocking := EXISTS (SELECT 1 FROM held_messages h WHERE h.processor_id = p_processor_id
                            AND h.partition = p_partition AND h.blocks)
            OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.processor_id = p_processor_id
                       AND d.partition = p_partition AND d.blocks);
        RETURN NEXT;
        RETURN;
    END IF;
    INSERT INTO processor_crashes AS s (processor_id, partition, held_transaction_ids, held_positions)
    SELECT p_processor_id, p_partition, array_agg(h.transaction_id ORDER BY h.place), array_agg(h.position ORDER BY h.place)
    FROM held_messages h
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_places)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET held_transaction_ids = excluded.held_transaction_ids, held_positions = excluded.held_positions;
    RETURN QUERY
        SELECT true, 0::double precision, true, h.transaction_id, h.position, h.key, h.message_id, h.message_type,
               h.publication_id, h.partition_key, CASE WHEN p_payload THEN h.data END,
               CASE WHEN p_payload THEN h.metadata END, h.scheduled, h.attempts, h.crash_count
        FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_places)
        ORDER BY h.place;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".settle_held_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid,
    p_transaction_ids xid8[], p_positions bigint[]
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of their effects: held messages are handled. -1: not the owner. Else how many were still held; less
-- than were named means that they were handled or dropped before: roll back.
DECLARE
    v record;
    v_key text;
    v_keys text[] := '{}';
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    FOR v IN SELECT * FROM unnest(p_transaction_ids, p_positions) AS w (t, p) LOOP
        DELETE FROM held_messages h
        WHERE h.transaction_id = v.t AND h.position = v.p AND h.processor_id = p_processor_id AND h.partition = p_partition
        RETURNING h.key INTO v_key;
        IF FOUND THEN
            v_keys := v_keys || v_key;
        END IF;
    END LOOP;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    UPDATE processor_crashes s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN cardinality(v_keys);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".fail_held_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_decisions jsonb
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Held messages failed again, each with its decision as in hold_messages(): try it later (Hold; without a wait: when a
-- user says so), keep it as a dead letter, or skip it for good. What waits behind a dead letter of its key goes on
-- waiting, if that blocks. -1: not the owner. Else how many of them are still held, before this.
DECLARE
    v record;
    v_gone held_messages;
    v_found int := 0;
    v_keys text[] := '{}';
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    UPDATE processor_crashes s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    FOR v IN
        SELECT * FROM jsonb_to_recordset(p_decisions) AS r (
            t xid8, p bigint, action text, attempts int, class text, error text, wait double precision, blocks boolean)
    LOOP
        IF v.action = 'Hold' THEN
            UPDATE held_messages h
            SET attempts = v.attempts, error_class = v.class, error = v.error, blocks = h.blocks OR v.blocks,
                next_attempt_at = coalesce(clock_timestamp() + make_interval(secs => v.wait), 'infinity')
            WHERE h.transaction_id = v.t AND h.position = v.p AND h.processor_id = p_processor_id AND h.partition = p_partition;
            v_found := v_found + FOUND::int;
            CONTINUE;
        END IF;
        DELETE FROM held_messages h
        WHERE h.transaction_id = v.t AND h.position = v.p AND h.processor_id = p_processor_id AND h.partition = p_partition
        RETURNING h.* INTO v_gone;
        CONTINUE WHEN NOT FOUND;
        v_found := v_found + 1;
        v_keys := v_keys || v_gone.key;
        IF v.action = 'DeadLetter' THEN
            INSERT INTO dead_letters (processor_id, partition, key, place, transaction_id, position, message_id,
                                      message_type, publication_id, partition_key, data, metadata, scheduled, attempts,
                                      error_class, error, blocks)
            VALUES (p_processor_id, p_partition, v_gone.key, v_gone.place, v.t, v.p, v_gone.message_id,
                    v_gone.message_type, v_gone.publication_id, v_gone.partition_key, v_gone.data, v_gone.metadata,
                    v_gone.scheduled, v.attempts, v.class, v.error, v.blocks);
        ELSE
            INSERT INTO audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            VALUES ('Skip', p_processor_id, p_partition, v.t, v.p,
                    skip_reason(v_gone.message_id, v_gone.message_type, v_gone.key, v.attempts, v.class, v.error),
                    'delivery.whenExhausted');
        END IF;
    END LOOP;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    RETURN v_found;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".review_partition(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_generation bigint, p_forgive boolean
) RETURNS TABLE (owned boolean, any_held boolean, blocking boolean, crash_count int, crash_count_alone int, in_flight int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What a new owner must know: whether a message is held, and what was in flight when former owners died. Messages that
-- wait for a user are tried again, as after every restart; poison messages are not, unless the resource was changed
-- since, or the handler (`p_forgive`).
#variable_conflict use_column
DECLARE
    v_forgiven boolean;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        UPDATE processor_crashes s SET generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.generation IS NULL;
        UPDATE processor_crashes s SET crash_count_alone = 0, crash_count = 0, in_flight = 0, counted_tokens = '{}', counted_alone_tokens = '{}', generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition
          AND (s.generation <> p_generation OR p_forgive);
        v_forgiven := FOUND;
        IF v_forgiven THEN
            UPDATE held_messages h SET crash_count = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.crash_count > 0;
        END IF;
        UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.next_attempt_at = 'infinity'
          AND NOT h.behind AND (h.error_class <> 'ProcessKilled' OR v_forgiven OR p_forgive);
        -- A change of the table by hand may have left a key without a message that is due.
        PERFORM advance_keys(p_processor_id, p_partition, (
            SELECT array_agg(DISTINCT h.key) FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.blocks AND h.behind));
    END IF;
    -- Two looks, because each has an index: what is behind blocks.
    blocking := EXISTS (SELECT 1 FROM held_messages h
                        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.blocks);
    any_held := blocking OR EXISTS (SELECT 1 FROM held_messages h
                                    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind);
    blocking := blocking OR EXISTS (SELECT 1 FROM dead_letters d
                                    WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.blocks);
    -- What happened before the checkpoint was last stored is over.
    SELECT CASE WHEN s.checkpoint_at = c.stored_at THEN s.crash_count ELSE 0 END,
           CASE WHEN s.crashed_alone_at > c.stored_at THEN s.crash_count_alone ELSE 0 END,
           CASE WHEN s.checkpoint_at = c.stored_at THEN s.in_flight ELSE 0 END
    INTO crash_count, crash_count_alone, in_flight
    FROM processor_crashes s
    JOIN processor_checkpoints c ON c.processor_id = s.processor_id AND c.partition = s.partition
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".redrive_dead_letters(
    p_processor_id text, p_partition int, p_ids bigint[], p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Give dead letters back to the processor, due now, each at its place in the order of its key (mode Competing has none).
-- Recorded. What is not there any more was redriven or dropped before, and does not count.
DECLARE
    v_count int;
    v_keys text[];
BEGIN
    PERFORM lock_partition(p_processor_id, p_partition);
    IF EXISTS (SELECT 1 FROM competing_processors p WHERE p.processor_id = p_processor_id) THEN
        v_count := redrive_competing(p_processor_id, p_ids);
    ELSE
        WITH back AS (
            DELETE FROM dead_letters d
            WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
            RETURNING d.*
        ), once AS (
            -- A message that was read again, after a rewind, may have died again.
            SELECT DISTINCT ON (b.transaction_id, b.position) b.* FROM back b
            ORDER BY b.transaction_id, b.position, b.blocks DESC, b.id DESC
        ), held AS (
            INSERT INTO held_messages AS h (processor_id, partition, key, place, transaction_id, position, message_id,
                                            message_type, publication_id, partition_key, data, metadata, scheduled,
                                            blocks, behind)
            SELECT b.processor_id, b.partition, coalesce(b.key, b.message_id), coalesce(b.place, nextval('held_order')),
                   b.transaction_id, b.position, b.message_id, b.message_type, b.publication_id, b.partition_key, b.data,
                   b.metadata, b.scheduled, b.blocks, false
            FROM once b ORDER BY b.place
            -- Read again after a rewind, it waits where it was read again.
            ON CONFLICT (processor_id, partition, transaction_id, position) DO UPDATE
            SET attempts = 0, crash_count = 0, next_attempt_at = clock_timestamp()
        )
        SELECT count(*), array_agg(b.key) INTO v_count, v_keys FROM back b;
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    END IF;
    IF v_count > 0 THEN
        INSERT INTO audit_log (action, processor_id, partition, reason, decided_by)
        VALUES ('Redrive', p_processor_id, p_partition,
                format('%s dead letter%s: %s', v_count, CASE WHEN v_count <> 1 THEN 's' END, p_reason), p_decided_by);
    END IF;
    RETURN v_count;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".drop_dead_letters(
    p_processor_id text, p_partition int, p_ids bigint[], p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Dead letters that shall never be handled: what waits behind them goes on. Each is recorded by its message id.
DECLARE
    v_keys text[];
BEGIN
    PERFORM lock_partition(p_processor_id, p_partition);
    WITH gone AS (
        DELETE FROM dead_letters d
        WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
        RETURNING d.*
    ), entries AS (
        INSERT INTO audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'DropDeadLetter', g.processor_id, g.partition, g.transaction_id, g.position,
               format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason), p_decided_by
        FROM gone g ORDER BY g.id
    ), read_again AS (
        -- After a rewind; what is not behind is handled again although its dead letter is dropped.
        DELETE FROM held_messages h USING gone g
        WHERE h.transaction_id = g.transaction_id AND h.position = g.position AND h.processor_id = g.processor_id
          AND h.partition = g.partition AND h.behind
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".decide_held_messages(
    p_processor_id text, p_partition int, p_places bigint[], p_drop boolean, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Held messages whose attempts ran out and that stop their key: try them again now, or drop them for good. Recorded.
DECLARE
    v_keys text[];
BEGIN
    PERFORM lock_partition(p_processor_id, p_partition);
    IF p_drop THEN
        WITH gone AS (
            DELETE FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.*
        ), entries AS (
            INSERT INTO audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            SELECT 'DropHeldMessage', g.processor_id, g.partition, g.transaction_id, g.position,
                   format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason),
                   p_decided_by
            FROM gone g ORDER BY g.place
        )
        SELECT array_agg(g.key) INTO v_keys FROM gone g;
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    ELSE
        WITH again AS (
            UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0, crash_count = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.key
        )
        SELECT array_agg(a.key) INTO v_keys FROM again a;
        IF v_keys IS NOT NULL THEN
            INSERT INTO audit_log (action, processor_id, partition, reason, decided_by)
            VALUES ('Redrive', p_processor_id, p_partition,
                    format('%s held message%s: %s', cardinality(v_keys), CASE WHEN cardinality(v_keys) <> 1 THEN 's' END,
                           p_reason), p_decided_by);
        END IF;
    END IF;
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;
