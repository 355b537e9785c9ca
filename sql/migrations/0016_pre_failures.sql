-- What failed, and what waits behind it: nothing waits behind what is given up, nothing overtakes within its key, and no attempt
-- that had an answer is taken for a death.

-- A mapped table's payload, type and publication may be null: such a message fails, waits and is redriven like any other.
ALTER TABLE :"schema".held_messages
    ALTER COLUMN data DROP NOT NULL, ALTER COLUMN message_type DROP NOT NULL, ALTER COLUMN publication_id DROP NOT NULL;
ALTER TABLE :"schema".dead_letters
    ALTER COLUMN data DROP NOT NULL, ALTER COLUMN message_type DROP NOT NULL, ALTER COLUMN publication_id DROP NOT NULL;
ALTER TABLE :"schema".competing_copies
    ALTER COLUMN data DROP NOT NULL, ALTER COLUMN message_type DROP NOT NULL, ALTER COLUMN publication_id DROP NOT NULL;

-- The latest process that was counted as dead while it tried held messages, and which: it takes that back when it comes again.
ALTER TABLE :"schema".processor_suspicions
    ADD COLUMN died_token uuid, ADD COLUMN died_transaction_ids xid8[] NOT NULL DEFAULT '{}',
    ADD COLUMN died_positions bigint[] NOT NULL DEFAULT '{}';

CREATE OR REPLACE FUNCTION :"schema".set_aside(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint that passes them: keep messages that are not handled now. Of `p_rows`, in reading
-- order, the one with attempts > 0 failed and becomes what `p_action` says (Hold, DeadLetter, Skip); the others wait,
-- behind a message of their key or until `next_attempt_at`. What became due since it was read waits behind what blocks its
-- key here, not behind what is given up here. -1: not the owner. Else how many are held.
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
               AND (r.before OR is_key_blocked(p_processor_id, p_partition, r.key, 9223372036854775807)),
           CASE WHEN r.failed THEN p_attempts ELSE 0 END,
           CASE WHEN r.failed THEN p_error_class END, CASE WHEN r.failed THEN p_error END,
           CASE WHEN r.failed THEN coalesce(v_now + p_wait, 'infinity')
                WHEN r.delayed THEN r.next_attempt_at ELSE v_now END
    FROM (SELECT u.*, u.attempts > 0 AS failed,
                 u.attempts = 0 AND coalesce(u.next_attempt_at > v_now, false) AS delayed,
                 coalesce(bool_or(CASE WHEN u.attempts > 0 THEN p_action = 'Hold' AND p_blocks
                                       ELSE NOT coalesce(u.next_attempt_at > v_now, false) END)
                          OVER (PARTITION BY u.key ORDER BY u.ordinality
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS before
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
    -- A delayed one that is due takes its place: behind what blocks its key. So does one of several that a person had
    -- tried again: behind the first of its key.
    UPDATE held_messages h SET behind = true, blocks = true
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
      AND h.next_attempt_at <= clock_timestamp() AND h.attempts = 0
      AND CASE WHEN h.blocks
               THEN EXISTS (SELECT 1 FROM held_messages f
                            WHERE f.processor_id = p_processor_id AND f.partition = p_partition AND f.key_hash = h.key_hash
                              AND f.key = h.key AND f.blocks AND NOT f.behind AND f.place < h.place)
               ELSE is_key_blocked(p_processor_id, p_partition, h.key, h.place) END;
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
            -- Up to the first that is not to be tried with others: none of its key overtakes it.
            SELECT n.place, bool_and(n.behind AND n.deaths = 0) OVER (ORDER BY n.place) AS free
            FROM (SELECT b.place, b.behind, b.deaths FROM held_messages b
                  WHERE b.processor_id = p_processor_id AND b.partition = p_partition AND b.key_hash = h.key_hash
                    AND b.key = h.key AND b.blocks AND b.place > h.place
                  ORDER BY b.place LIMIT p_limit) AS n) AS f
        WHERE f.free AND h.attempts = 0 AND h.blocks AND NOT EXISTS (SELECT 1 FROM heads s WHERE s.deaths > 0)
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

CREATE OR REPLACE FUNCTION :"schema".end_suspect(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What begin_suspect or take_due_messages wrote down was tried, and the process lives: whatever becomes of it later is no
-- death of theirs.
UPDATE processor_suspicions s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
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
        died_token = CASE WHEN s.held_positions = '{}' THEN s.died_token ELSE p_token END,
        died_transaction_ids = CASE WHEN s.held_positions = '{}' THEN s.died_transaction_ids ELSE s.held_transaction_ids END,
        died_positions = CASE WHEN s.held_positions = '{}' THEN s.died_positions ELSE s.held_positions END,
        begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}';
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".acquit_survivor(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Whoever was counted as dead and calls again was frozen, cut off, or waiting: no message killed it.
-- Of held messages the latest death is remembered by its process.
WITH held AS (
    UPDATE held_messages h SET deaths = greatest(h.deaths - 1, 0)
    FROM processor_suspicions s, unnest(s.died_transaction_ids, s.died_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.died_token = p_token
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position
)
UPDATE processor_suspicions s
SET died_token = nullif(s.died_token, p_token),
    died_transaction_ids = CASE WHEN s.died_token = p_token THEN '{}' ELSE s.died_transaction_ids END,
    died_positions = CASE WHEN s.died_token = p_token THEN '{}' ELSE s.died_positions END,
    deaths = greatest(s.deaths - 1, 0), accused = array_remove(s.accused, p_token),
    kills = greatest(s.kills - (p_token = ANY (s.accused_alone))::int, 0),
    accused_alone = array_remove(s.accused_alone, p_token)
WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND (p_token = ANY (s.accused) OR s.died_token = p_token)
$function$;
