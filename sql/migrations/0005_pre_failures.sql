-- What becomes of messages that fail, kill their process, or whose time has not come: held ones wait and are tried again, dead
-- ones wait for a person. Both are copies: what the checkpoint has passed may be deleted from the outbox.

-- Not before this time; null: at once. Read by processors in mode Partitioned; mode Ordered waits for it.
ALTER TABLE :"schema".messages ADD COLUMN deliver_after timestamptz;

CREATE SEQUENCE :"schema".held_order;

COMMENT ON SEQUENCE :"schema".held_order IS
    'Places in the order of keys: the order in which a lane set messages aside, which is the order in which it read them.';

CREATE TABLE :"schema".held_messages (
    processor_id    text        NOT NULL,
    partition       int         NOT NULL DEFAULT 0,
    key             text        NOT NULL,
    -- keys may be longer than an index entry
    key_hash        bigint      GENERATED ALWAYS AS (hashtextextended(key, 0)) STORED,
    place           bigint      NOT NULL,
    transaction_id  xid8        NOT NULL,
    position        bigint      NOT NULL,
    message_id      text        NOT NULL,
    message_type    text        NOT NULL,
    publication_id  text        NOT NULL DEFAULT 'default',
    partition_key   text,
    data            text        NOT NULL,
    metadata        text,
    scheduled       timestamptz,
    blocks          boolean     NOT NULL,
    behind          boolean     NOT NULL,
    attempts        int         NOT NULL DEFAULT 0,
    deaths          int         NOT NULL DEFAULT 0,
    error_class     text,
    error           text,
    held_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT held_messages_pkey PRIMARY KEY (processor_id, partition, transaction_id, position),
    CONSTRAINT held_messages_behind_block_what_follows CHECK (blocks OR NOT behind)
) WITH (fillfactor = 70);

CREATE INDEX held_messages_due ON :"schema".held_messages (processor_id, partition, next_attempt_at) WHERE NOT behind;
CREATE INDEX held_messages_by_place ON :"schema".held_messages (place);
CREATE INDEX held_messages_by_key ON :"schema".held_messages (processor_id, partition, key_hash, place) WHERE blocks;

COMMENT ON TABLE :"schema".held_messages IS
    'Messages that the checkpoint has passed and that are not handled yet: one that fails (attempts; next_attempt_at infinity: it waits for a person), those behind it with its key, and delayed ones.';

CREATE TABLE :"schema".dead_letters (
    id              bigint      GENERATED ALWAYS AS IDENTITY,
    processor_id    text        NOT NULL,
    partition       int         NOT NULL DEFAULT 0,
    key             text,
    key_hash        bigint      GENERATED ALWAYS AS (hashtextextended(key, 0)) STORED,
    place           bigint,
    transaction_id  xid8        NOT NULL,
    position        bigint      NOT NULL,
    message_id      text        NOT NULL,
    message_type    text        NOT NULL,
    publication_id  text        NOT NULL DEFAULT 'default',
    partition_key   text,
    data            text        NOT NULL,
    metadata        text,
    scheduled       timestamptz,
    attempts        int         NOT NULL,
    error_class     text        NOT NULL,
    error           text        NOT NULL,
    blocks          boolean     NOT NULL DEFAULT false,
    died_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT dead_letters_pkey PRIMARY KEY (id)
);

CREATE INDEX dead_letters_by_processor ON :"schema".dead_letters (processor_id, id);
CREATE INDEX dead_letters_blocking ON :"schema".dead_letters (processor_id, partition, key_hash) WHERE blocks;

COMMENT ON TABLE :"schema".dead_letters IS
    'Messages whose attempts ran out, with error and attempts, until a person has them handled again or drops them. Where one blocks, later messages of its key are held behind it.';

CREATE TABLE :"schema".processor_suspicions (
    processor_id         text        NOT NULL,
    partition            int         NOT NULL DEFAULT 0,
    deaths               int         NOT NULL DEFAULT 0,
    checkpoint_at        timestamptz,
    transaction_id       xid8,
    position             bigint,
    suspects             int         NOT NULL DEFAULT 0,
    begun_at             timestamptz,
    kills                int         NOT NULL DEFAULT 0,
    killed_at            timestamptz,
    generation           bigint,
    held_transaction_ids xid8[]      NOT NULL DEFAULT '{}',
    held_positions       bigint[]    NOT NULL DEFAULT '{}',
    accused              uuid[]      NOT NULL DEFAULT '{}',
    accused_alone        uuid[]      NOT NULL DEFAULT '{}',
    CONSTRAINT processor_suspicions_pkey PRIMARY KEY (processor_id, partition)
) WITH (fillfactor = 50);

COMMENT ON COLUMN :"schema".processor_suspicions.accused IS
    'Whose leases lapsed while the checkpoint stood there: counted in deaths, and taken back for one that comes again.';
COMMENT ON COLUMN :"schema".processor_suspicions.accused_alone IS
    'Those of them that tried the one message alone: counted in kills.';
COMMENT ON TABLE :"schema".processor_suspicions IS
    'Of what owners may have died: deaths at one and the same checkpoint, and what was tried at that moment where it was written down before.';

CREATE OR REPLACE FUNCTION :"schema".lock_lane(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Whoever changes held messages or dead letters from outside waits for the owner's open transaction and keeps the next
-- one waiting: what is behind what is only changed by one at a time.
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
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Something of these keys was handled, dropped or skipped: the first that waits behind it is due, unless a dead letter
-- still blocks the key. One look for each key, however many wait.
    UPDATE held_messages h SET behind = false, next_attempt_at = clock_timestamp()
    FROM (SELECT DISTINCT k FROM unnest(p_keys) AS k) AS wanted
    CROSS JOIN LATERAL (
        SELECT f.transaction_id, f.position, f.behind FROM held_messages f
        WHERE f.processor_id = p_processor_id AND f.partition = p_partition
          AND f.key_hash = hashtextextended(wanted.k, 0) AND f.key = wanted.k AND f.blocks
        ORDER BY f.place LIMIT 1) AS first
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND first.behind
      AND h.transaction_id = first.transaction_id AND h.position = first.position
      AND NOT EXISTS (SELECT 1 FROM dead_letters d
                      WHERE d.processor_id = p_processor_id AND d.partition = p_partition
                        AND d.key_hash = hashtextextended(wanted.k, 0) AND d.key = wanted.k AND d.blocks)
$function$;

CREATE OR REPLACE FUNCTION :"schema".set_aside(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint that passes them: keep messages that are not handled now. Of `p_rows`, in reading
-- order, the one with attempts > 0 failed and becomes what `p_action` says (Hold, DeadLetter, Skip); the others wait,
-- behind a message of their key or until `next_attempt_at`. -1: not the owner. Else how many are held.
DECLARE
    v_now timestamptz := clock_timestamp();
    v_kept int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    IF p_action = 'DeadLetter' THEN
        INSERT INTO dead_letters (processor_id, partition, key, transaction_id, position, message_id, message_type,
                                  publication_id, partition_key, data, metadata, scheduled, attempts, error_class,
                                  error, blocks, place)
        SELECT p_processor_id, p_partition, r.key, r.transaction_id, r.position, r.message_id, r.message_type,
               r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled, p_attempts, p_error_class,
               p_error, p_blocks, nextval('held_order')
        FROM unnest(p_rows) AS r WHERE r.attempts > 0;
    ELSIF p_action = 'Skip' THEN
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, p_partition, r.transaction_id, r.position,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', r.message_id, r.message_type,
                      r.key, p_attempts, p_error_class, p_error),
               'delivery.whenExhausted'
        FROM unnest(p_rows) AS r WHERE r.attempts > 0;
    END IF;
    INSERT INTO held_messages (processor_id, partition, key, place, transaction_id, position, message_id, message_type,
                               publication_id, partition_key, data, metadata, scheduled, blocks, behind, attempts,
                               error_class, error, next_attempt_at)
    SELECT p_processor_id, p_partition, r.key, nextval('held_order'), r.transaction_id, r.position, r.message_id,
           r.message_type, r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled,
           CASE WHEN r.failed THEN p_blocks ELSE NOT r.delayed END,
           NOT r.failed AND NOT r.delayed
               AND (r.turn > 1 OR is_key_blocked(p_processor_id, p_partition, r.key, 9223372036854775807)),
           CASE WHEN r.failed THEN p_attempts ELSE 0 END,
           CASE WHEN r.failed THEN p_error_class END, CASE WHEN r.failed THEN p_error END,
           CASE WHEN r.failed THEN coalesce(v_now + p_wait, 'infinity')
                WHEN r.delayed THEN r.next_attempt_at ELSE v_now END
    FROM (SELECT u.*, u.attempts > 0 AS failed,
                 u.attempts = 0 AND coalesce(u.next_attempt_at > v_now, false) AS delayed,
                 row_number() OVER (PARTITION BY u.key, coalesce(u.next_attempt_at > v_now, false)
                                    ORDER BY u.ordinality) AS turn
          FROM unnest(p_rows) WITH ORDINALITY AS u) AS r
    WHERE NOT r.failed OR p_action = 'Hold'
    ORDER BY r.ordinality
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".take_due_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_limit int, p_payload boolean
) RETURNS TABLE (
    owned boolean, next_in double precision, blocking boolean, transaction_id xid8, "position" bigint, key text,
    message_id text, message_type text, publication_id text, partition_key text, data text, metadata text,
    scheduled timestamptz, attempts int, deaths int
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The held messages to be tried now, in order of their keys, and written down as begun: should the process die of one,
-- the next owner knows. One that a process died of comes alone. Always one row at least; without a message it says in
-- how many seconds there is one (null: never by itself), and whether later messages of some key must wait.
#variable_conflict use_column
DECLARE
    v_places bigint[];
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF NOT owned THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- A delayed one that is due takes its place: behind what blocks its key.
    UPDATE held_messages h SET behind = true, blocks = true
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind AND NOT h.blocks
      AND h.next_attempt_at <= clock_timestamp() AND h.attempts = 0
      AND is_key_blocked(p_processor_id, p_partition, h.key, h.place);
    WITH heads AS MATERIALIZED (
        SELECT h.place, h.key, h.key_hash, h.attempts, h.deaths, h.blocks, h.next_attempt_at FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
          AND h.next_attempt_at <= clock_timestamp()
        ORDER BY h.next_attempt_at, h.place LIMIT p_limit
    ), chosen AS (
        SELECT h.place FROM heads h WHERE NOT EXISTS (SELECT 1 FROM heads s WHERE s.deaths > 0)
        UNION ALL
        SELECT f.place FROM heads h
        CROSS JOIN LATERAL (
            SELECT b.place FROM held_messages b
            WHERE b.processor_id = p_processor_id AND b.partition = p_partition AND b.key_hash = h.key_hash
              AND b.key = h.key AND b.blocks AND b.behind AND b.deaths = 0
            ORDER BY b.place LIMIT p_limit) AS f
        WHERE h.attempts = 0 AND h.blocks AND NOT EXISTS (SELECT 1 FROM heads s WHERE s.deaths > 0)
          AND NOT is_key_blocked(p_processor_id, p_partition, h.key, h.place)
        UNION ALL
        (SELECT s.place FROM heads s WHERE s.deaths > 0 ORDER BY s.next_attempt_at, s.place LIMIT 1)
    )
    SELECT array_agg(c.place) INTO v_places FROM (SELECT place FROM chosen ORDER BY place LIMIT p_limit) AS c;
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
    INSERT INTO processor_suspicions AS s (processor_id, partition, held_transaction_ids, held_positions)
    SELECT p_processor_id, p_partition, array_agg(h.transaction_id ORDER BY h.place), array_agg(h.position ORDER BY h.place)
    FROM held_messages h
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_places)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET held_transaction_ids = excluded.held_transaction_ids, held_positions = excluded.held_positions;
    RETURN QUERY
        SELECT true, 0::double precision, true, h.transaction_id, h.position, h.key, h.message_id, h.message_type,
               h.publication_id, h.partition_key, CASE WHEN p_payload THEN h.data END,
               CASE WHEN p_payload THEN h.metadata END, h.scheduled, h.attempts, h.deaths
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
    v_keys text[];
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    WITH gone AS (
        DELETE FROM held_messages h
        USING unnest(p_transaction_ids, p_positions) AS w (transaction_id, position)
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition
          AND h.transaction_id = w.transaction_id AND h.position = w.position
        RETURNING h.key
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".fail_held_message(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A held message failed again: try it later (Hold; without a wait: when a person says so), keep it as a dead letter, or
-- skip it for good. What waits behind a dead letter of its key goes on waiting. -1: not the owner. 0: it is held no more.
DECLARE
    v_held held_messages;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    UPDATE held_messages h
    SET attempts = p_attempts, error_class = p_error_class, error = p_error, blocks = h.blocks OR p_blocks,
        next_attempt_at = coalesce(clock_timestamp() + p_wait, 'infinity')
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = p_transaction_id AND h.position = p_position
    RETURNING h.* INTO v_held;
    IF NOT FOUND THEN
        RETURN 0;
    ELSIF p_action = 'Hold' THEN
        RETURN 1;
    END IF;
    DELETE FROM held_messages h
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = p_transaction_id AND h.position = p_position;
    IF p_action = 'DeadLetter' THEN
        INSERT INTO dead_letters (processor_id, partition, key, place, transaction_id, position, message_id,
                                  message_type, publication_id, partition_key, data, metadata, scheduled, attempts,
                                  error_class, error, blocks)
        VALUES (p_processor_id, p_partition, v_held.key, v_held.place, v_held.transaction_id, v_held.position,
                v_held.message_id, v_held.message_type, v_held.publication_id, v_held.partition_key, v_held.data,
                v_held.metadata, v_held.scheduled, p_attempts, p_error_class, p_error, v_held.blocks);
    ELSE
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        VALUES ('Skip', p_processor_id, p_partition, p_transaction_id, p_position,
                format('message %s of type %s, key %s, after %s attempts: %s: %s', v_held.message_id,
                       v_held.message_type, v_held.key, p_attempts, p_error_class, p_error),
                'delivery.whenExhausted');
    END IF;
    PERFORM advance_keys(p_processor_id, p_partition, ARRAY[v_held.key]);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".review_lane(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_generation bigint, p_forgive boolean
) RETURNS TABLE (owned boolean, any_held boolean, blocking boolean, deaths int, kills int, suspects int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What a new owner must know: whether anything is held, and of what former owners died. What was given up is tried
-- again, as after every restart; what killed processes is not, unless the resource was changed since, or the handler
-- (`p_forgive`).
#variable_conflict use_column
DECLARE
    v_forgiven boolean;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        UPDATE processor_suspicions s SET generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.generation IS NULL;
        UPDATE processor_suspicions s SET kills = 0, deaths = 0, suspects = 0, accused = '{}', accused_alone = '{}', generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition
          AND (s.generation <> p_generation OR p_forgive);
        v_forgiven := FOUND;
        IF v_forgiven THEN
            UPDATE held_messages h SET deaths = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.deaths > 0;
        END IF;
        UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.next_attempt_at = 'infinity'
          AND NOT h.behind AND (h.error_class <> 'ProcessKilled' OR v_forgiven OR p_forgive);
        -- Whoever changed the table by hand may have left a key without one that is due.
        PERFORM advance_keys(p_processor_id, p_partition, (
            SELECT array_agg(DISTINCT h.key) FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.behind));
    END IF;
    any_held := EXISTS (SELECT 1 FROM held_messages h
                        WHERE h.processor_id = p_processor_id AND h.partition = p_partition);
    blocking := EXISTS (SELECT 1 FROM held_messages h WHERE h.processor_id = p_processor_id
                        AND h.partition = p_partition AND h.blocks)
        OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.processor_id = p_processor_id
                   AND d.partition = p_partition AND d.blocks);
    -- What happened before the checkpoint was last stored is over.
    SELECT CASE WHEN s.checkpoint_at = c.stored_at THEN s.deaths ELSE 0 END,
           CASE WHEN s.killed_at > c.stored_at THEN s.kills ELSE 0 END,
           CASE WHEN s.checkpoint_at = c.stored_at THEN s.suspects ELSE 0 END
    INTO deaths, kills, suspects
    FROM processor_suspicions s
    JOIN processor_checkpoints c ON c.processor_id = s.processor_id AND c.partition = s.partition
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_suspect(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_generation bigint, p_suspects int
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Two owners died at this checkpoint: write down how many messages are tried now, before they are; the last one is the one
-- named. -1: not the owner. Else how many processes died of this very message, which was tried alone.
DECLARE
    v_kills int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    INSERT INTO processor_suspicions AS s
        (processor_id, partition, transaction_id, position, begun_at, generation, suspects)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position, clock_timestamp(), p_generation, p_suspects)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET transaction_id = p_transaction_id, position = p_position, begun_at = clock_timestamp(),
        generation = p_generation, suspects = p_suspects,
        kills = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.kills ELSE 0 END,
        accused_alone = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.accused_alone
                             ELSE '{}' END
    RETURNING s.kills INTO v_kills;
    RETURN v_kills;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".end_suspect(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What begin_suspect wrote down was tried, and the process lives: whatever becomes of it later is no death of theirs.
UPDATE processor_suspicions s SET begun_at = NULL
WHERE s.processor_id = p_processor_id AND s.partition = p_partition
  AND holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token)
$function$;

CREATE OR REPLACE FUNCTION :"schema".count_death(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Called with a new epoch, once: the former owner gave the lease back (p_token null), or it lapsed and its process is gone,
-- frozen, or cut off; that one takes its death back when it comes again (acquit_survivor).
-- Deaths count while the checkpoint stays where it is; of a message only where it was tried alone, or was held. Who died
-- while so many messages were tried leaves those under suspicion; any other death leaves none.
DECLARE
    v_at timestamptz;
    v_alone uuid[];
BEGIN
    IF p_token IS NULL THEN
        UPDATE processor_suspicions s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
        RETURN;
    END IF;
    SELECT c.stored_at INTO v_at FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
    UPDATE held_messages h SET deaths = h.deaths + 1
    FROM processor_suspicions s, unnest(s.held_transaction_ids, s.held_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position;
    -- What was tried alone and not stored since.
    SELECT ARRAY[p_token] INTO v_alone FROM processor_suspicions s
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND s.suspects = 1 AND s.begun_at > coalesce(v_at, '-infinity');
    INSERT INTO processor_suspicions AS s (processor_id, partition, deaths, checkpoint_at, accused)
    VALUES (p_processor_id, p_partition, 1, v_at, ARRAY[p_token])
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET deaths = CASE WHEN s.checkpoint_at = v_at THEN s.deaths + 1 ELSE 1 END,
        checkpoint_at = v_at,
        accused = CASE WHEN s.checkpoint_at = v_at THEN s.accused || p_token ELSE ARRAY[p_token] END,
        suspects = CASE WHEN s.begun_at > coalesce(v_at, '-infinity') THEN s.suspects ELSE 0 END,
        kills = s.kills + coalesce(cardinality(v_alone), 0),
        accused_alone = s.accused_alone || v_alone,
        killed_at = CASE WHEN v_alone IS NULL THEN s.killed_at ELSE clock_timestamp() END,
        begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}';
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".acquit_survivor(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Whoever was counted as dead and calls again was frozen, cut off, or waiting: no message killed it.
UPDATE processor_suspicions s
SET deaths = greatest(s.deaths - 1, 0), accused = array_remove(s.accused, p_token),
    kills = greatest(s.kills - (p_token = ANY (s.accused_alone))::int, 0),
    accused_alone = array_remove(s.accused_alone, p_token)
WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND p_token = ANY (s.accused)
$function$;

CREATE OR REPLACE FUNCTION :"schema".acquire_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (acquired boolean, epoch bigint, pod text, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A fresh epoch for the process that holds `p_token`. Refused: another process is alive, the claim is another's, a
-- conflict waits for a person, or the former owner is committing at this moment. Answers who holds the lease after the call.
-- A former owner that never gave its lease back is counted as dead: a message may be what it died of. One that calls again
-- lives, and was not killed by anything.
#variable_conflict use_column
DECLARE
    v_lease processor_leases;
    v_refused boolean;
BEGIN
    PERFORM acquit_survivor(p_processor_id, p_partition, p_token);
    SELECT l.* INTO v_lease FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
    v_refused := coalesce(v_lease.expires_at > clock_timestamp() AND v_lease.token <> p_token, false)
        OR NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
        OR EXISTS (SELECT 1 FROM processor_conflicts f WHERE f.processor_id = p_processor_id
                   AND f.partition = p_partition AND f.needs_person AND f.resolved_at IS NULL);
    IF NOT v_refused THEN
        BEGIN
            -- Against a claim that changes hands meanwhile; same order of locks as claim_processor.
            PERFORM 1 FROM processor_claims c
            WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
            v_refused := NOT FOUND;
            INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition)
            ON CONFLICT DO NOTHING;
            SELECT l.* INTO v_lease FROM processor_leases l
            WHERE l.processor_id = p_processor_id AND l.partition = p_partition
            FOR UPDATE;
            v_refused := v_refused
                OR coalesce(v_lease.expires_at > clock_timestamp() AND v_lease.token <> p_token, false);
            IF NOT v_refused THEN
                UPDATE processor_leases l
                SET epoch = l.epoch + 1, token = p_token, pod = p_pod, claim_uid = p_claim_uid,
                    acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
                    expires_at = clock_timestamp() + p_lease
                WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
                IF v_lease.token IS DISTINCT FROM p_token AND v_lease.epoch > 0 THEN
                    PERFORM count_death(p_processor_id, p_partition, v_lease.token);
                END IF;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            v_refused := true;
        END;
    END IF;
    RETURN QUERY
        SELECT NOT v_refused, l.epoch, l.pod, l.expires_at FROM processor_leases l
        WHERE l.processor_id = p_processor_id AND l.partition = p_partition
        UNION ALL
        SELECT false, NULL, NULL, NULL
        WHERE NOT EXISTS (SELECT 1 FROM processor_leases l
                          WHERE l.processor_id = p_processor_id AND l.partition = p_partition);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".redrive_dead_letters(
    p_processor_id text, p_partition int, p_ids bigint[], p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Give dead letters back to the processor, due now, each at its place in the order of its key (mode
-- Competing has none). Recorded. What is not
-- there any more was redriven or dropped before, and does not count.
DECLARE
    v_count int;
BEGIN
    PERFORM lock_lane(p_processor_id, p_partition);
    IF EXISTS (SELECT 1 FROM competing_processors p WHERE p.processor_id = p_processor_id) THEN
        v_count := redrive_competing(p_processor_id, p_ids);
    ELSE
        WITH back AS (
            DELETE FROM dead_letters d
            WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
            RETURNING d.*
        )
        INSERT INTO held_messages AS h (processor_id, partition, key, place, transaction_id, position, message_id,
                                        message_type, publication_id, partition_key, data, metadata, scheduled, blocks,
                                        behind)
        SELECT b.processor_id, b.partition, coalesce(b.key, b.message_id), coalesce(b.place, nextval('held_order')), b.transaction_id, b.position, b.message_id, b.message_type,
               b.publication_id, b.partition_key, b.data, b.metadata, b.scheduled, b.blocks, false
        FROM back b ORDER BY b.place
        ON CONFLICT (processor_id, partition, transaction_id, position) DO UPDATE
        SET behind = false, attempts = 0, deaths = 0, next_attempt_at = clock_timestamp();
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    IF v_count > 0 THEN
        INSERT INTO recorded_acts (act, processor_id, partition, reason, decided_by)
        VALUES ('Redrive', p_processor_id, p_partition, format('%s dead letters: %s', v_count, p_reason), p_decided_by);
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
    PERFORM lock_lane(p_processor_id, p_partition);
    WITH gone AS (
        DELETE FROM dead_letters d
        WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
        RETURNING d.*
    ), acts AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'DropDeadLetter', g.processor_id, g.partition, g.transaction_id, g.position,
               format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason), p_decided_by
        FROM gone g ORDER BY g.id
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
    PERFORM lock_lane(p_processor_id, p_partition);
    IF p_drop THEN
        WITH gone AS (
            DELETE FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.*
        ), acts AS (
            INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            SELECT 'DropHeldMessage', g.processor_id, g.partition, g.transaction_id, g.position,
                   format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason),
                   p_decided_by
            FROM gone g ORDER BY g.place
        )
        SELECT array_agg(g.key) INTO v_keys FROM gone g;
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    ELSE
        WITH again AS (
            UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0, deaths = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.key
        )
        SELECT array_agg(a.key) INTO v_keys FROM again a;
        IF v_keys IS NOT NULL THEN
            INSERT INTO recorded_acts (act, processor_id, partition, reason, decided_by)
            VALUES ('Redrive', p_processor_id, p_partition,
                    format('%s held messages: %s', cardinality(v_keys), p_reason), p_decided_by);
        END IF;
    END IF;
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text) TO PUBLIC;
