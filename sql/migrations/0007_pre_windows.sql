-- Cursor Snapshot: a checkpoint that is a window between two snapshots. Its row holds the pair (0, counter), so that whoever
-- compares pairs goes on working, and the window beside it. Rows written before have cursor_kind TransactionOrder.

ALTER TABLE :"schema".processor_checkpoints
    ADD COLUMN cursor_kind     text NOT NULL DEFAULT 'TransactionOrder',
    ADD COLUMN lower_snapshot  pg_snapshot,
    ADD COLUMN upper_snapshot  pg_snapshot,
    ADD COLUMN window_position bigint,
    ADD COLUMN kept_window     uuid,
    ADD CONSTRAINT processor_checkpoints_cursor_kind_is_known CHECK (cursor_kind IN ('TransactionOrder', 'Snapshot')),
    ADD CONSTRAINT processor_checkpoints_window_is_whole CHECK ((upper_snapshot IS NULL) = (window_position IS NULL)),
    -- A caller that stores a pair over a window, or the other way round, is an error, not an answer.
    ADD CONSTRAINT processor_checkpoints_kinds_do_not_mix CHECK (
        CASE cursor_kind
            WHEN 'Snapshot' THEN last_processed_transaction_id = '0' AND last_processed_position > 0
            ELSE lower_snapshot IS NULL AND upper_snapshot IS NULL
        END);

COMMENT ON COLUMN :"schema".processor_checkpoints.cursor_kind IS
    'TransactionOrder: the pair is a place. Snapshot: the pair is (0, counter), and the window says what is examined. Never changes.';
COMMENT ON COLUMN :"schema".processor_checkpoints.lower_snapshot IS
    'Everything that this sees is examined; null with cursor_kind Snapshot: nothing yet.';
COMMENT ON COLUMN :"schema".processor_checkpoints.upper_snapshot IS
    'Of what this sees besides, everything up to window_position is examined; null between two windows.';

CREATE OR REPLACE FUNCTION :"schema".window_seal(p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint)
RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A window in 16 bytes: its copy need not be as long as a list of transactions in progress can be.
SELECT md5(coalesce(p_lower::text, '') || '/' || coalesce(p_upper::text, '') || '/'
           || coalesce(p_position::text, ''))::uuid
$function$;

CREATE OR REPLACE FUNCTION :"schema".keep_checkpoint(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What stands in the row is ours: for functions of ours that have just written it otherwise than by the contract's step 6,
-- and where a person accepts what is there. Partition null: all of them.
BEGIN
    UPDATE processor_checkpoints c
    SET kept_transaction_id = c.last_processed_transaction_id, kept_position = c.last_processed_position,
        kept_window = CASE c.cursor_kind
                      WHEN 'Snapshot' THEN window_seal(c.lower_snapshot, c.upper_snapshot, c.window_position) END
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition);
    INSERT INTO kept_checkpoints (processor_id, partition)
    SELECT c.processor_id, c.partition FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition)
    ON CONFLICT DO NOTHING;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".find_edit(p_processor_id text, p_partition int)
RETURNS TABLE (kept_transaction_id xid8, kept_position bigint, transaction_id xid8, "position" bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- One row if somebody changed or deleted the checkpoint past our functions: the pair that they had stored (null: the whole row
-- was written by hand) and the one that is there (null: none). Against mistakes, not against forgery: the copy is in the row,
-- and whoever may write that can write the copy too. A first row that was inserted by hand is nobody's edit.
SELECT c.kept_transaction_id, c.kept_position, c.last_processed_transaction_id, c.last_processed_position
FROM kept_checkpoints k
LEFT JOIN processor_checkpoints c ON c.processor_id = k.processor_id AND c.partition = k.partition
WHERE k.processor_id = p_processor_id AND k.partition = p_partition
  AND (c.kept_position IS NULL
       OR (c.kept_transaction_id, c.kept_position) <> (c.last_processed_transaction_id, c.last_processed_position)
       OR c.kept_window IS DISTINCT FROM CASE c.cursor_kind
          WHEN 'Snapshot' THEN window_seal(c.lower_snapshot, c.upper_snapshot, c.window_position) END)
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_window(
    p_processor_id text, p_partition int,
    p_new_counter bigint, p_new_lower pg_snapshot, p_new_upper pg_snapshot, p_new_position bigint,
    p_expected_counter bigint, p_expected_lower pg_snapshot, p_expected_upper pg_snapshot, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off
AS $function$
-- The checkpoint contract for the cursor Snapshot, with the counter in place of the pair: 1 stored, 0 ignored (already
-- there), 2 further ahead, 3 older, 4 not the owner. The same counter with another window is 2. Everything but 1: roll
-- back. The row is locked before it is compared; it is found by its latest generation, as in store_processor_checkpoint.
DECLARE
    v_stored record;
    v_window text;
    v_new text := concat_ws('/', p_new_lower::text, p_new_upper::text, p_new_position);
    v_expected text := concat_ws('/', p_expected_lower::text, p_expected_upper::text, p_expected_position);
BEGIN
    -- step 1
    IF p_processor_id IS NULL OR p_partition IS NULL OR p_new_counter IS NULL
       OR (p_new_upper IS NULL) <> (p_new_position IS NULL)
       OR (p_expected_upper IS NULL) <> (p_expected_position IS NULL)
       OR p_expected_counter IS NULL AND v_expected <> '' THEN
        RAISE EXCEPTION 'half a checkpoint: new % (%), expected % (%)', p_new_counter, v_new, p_expected_counter, v_expected
            USING ERRCODE = 'null_value_not_allowed',
                  HINT = 'Name the counter; an upper snapshot goes with a position inside the window.';
    END IF;
    IF p_new_counter < 1 OR p_new_counter <= p_expected_counter
       OR p_expected_lower IS NOT NULL
          AND (p_new_lower IS NULL OR pg_snapshot_xmax(p_new_lower) < pg_snapshot_xmax(p_expected_lower)) THEN
        RAISE EXCEPTION 'a checkpoint never moves back: new % (%) is not after expected % (%)', p_new_counter, v_new,
            p_expected_counter, v_expected
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rewind_processor_window() is the recorded way back.';
    END IF;
    -- step 2
    IF p_epoch IS NULL AND p_owner_token IS NULL THEN
        IF refuses_stranger(p_processor_id, p_partition) THEN
            RETURN 4;
        END IF;
    ELSIF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN 4;
    END IF;
    LOOP
        SELECT c.ctid AS place, c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id || '' = p_processor_id AND c.partition = p_partition
        ORDER BY c.generation DESC LIMIT 1
        FOR UPDATE;
        EXIT WHEN FOUND;
        IF p_expected_counter IS NOT NULL
           AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
            RETURN 3;  -- step 5
        END IF;
        -- Of two callers one inserts; an old snapshot that cannot see the other's row gets 40001 here.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind,
             lower_snapshot, upper_snapshot, window_position)
        VALUES (p_processor_id, p_partition, '0', p_new_counter, 'Snapshot', p_new_lower, p_new_upper, p_new_position)
        ON CONFLICT DO NOTHING;
        IF FOUND AND p_expected_counter IS NOT NULL THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
            RETURN 3;  -- step 5
        ELSIF FOUND THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
            RETURN 1;  -- step 4
        END IF;
    END LOOP;
    IF v_stored.cursor_kind <> 'Snapshot' THEN
        RAISE EXCEPTION 'the checkpoint of % is a pair, cursor %: a window means nothing to it', p_processor_id,
            v_stored.cursor_kind
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use another processorId for the cursor Snapshot.';
    END IF;
    v_window := concat_ws('/', v_stored.lower_snapshot::text, v_stored.upper_snapshot::text, v_stored.window_position);
    IF v_stored.last_processed_position = p_new_counter THEN
        RETURN CASE WHEN v_window = v_new THEN 0 ELSE 2 END;  -- step 3
    ELSIF v_stored.last_processed_position = p_expected_counter AND v_window = v_expected THEN
        UPDATE processor_checkpoints c
        SET last_processed_position = p_new_counter,
            lower_snapshot = p_new_lower,
            upper_snapshot = p_new_upper,
            window_position = p_new_position,
            kept_transaction_id = '0',
            kept_position = p_new_counter,
            kept_window = window_seal(p_new_lower, p_new_upper, p_new_position),
            generation = c.generation + (random() < 0.01)::int,
            stored_at = clock_timestamp()
        WHERE c.ctid = v_stored.place;
        IF v_stored.kept_position IS NULL THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
        END IF;
        RETURN 1;  -- step 6
    ELSIF p_expected_counter IS NULL OR v_stored.last_processed_position >= p_expected_counter THEN
        RETURN 2;  -- step 7
    END IF;
    RETURN 3;  -- step 8
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_windows(
    p_processor_id text, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Right after begin_partitions, in its transaction: all partitions start from this one window. False: not the owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    -- Only what begin_partitions has just written: no row of a table has transaction id 0, and no pair is 0:1.
    UPDATE processor_checkpoints c
    SET cursor_kind = 'Snapshot', lower_snapshot = p_lower, upper_snapshot = p_upper, window_position = p_position
    WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'TransactionOrder'
      AND c.last_processed_transaction_id = '0' AND c.last_processed_position = 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".rewind_processor_window(
    p_processor_id text, p_partition int, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: put the checkpoint to a window that a person chose, back or forward, and record it. The counter goes
-- on, so that whoever expects the old one is told 2. 1 done; 4 refused: an owner is live.
DECLARE
    v_stored processor_checkpoints;
    v_expires timestamptz;
    v_counter bigint;
BEGIN
    IF (p_upper IS NULL) <> (p_position IS NULL) THEN
        RAISE EXCEPTION 'half a window: an upper snapshot goes with a position inside it'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition) ON CONFLICT DO NOTHING;
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR UPDATE;
    IF v_expires > clock_timestamp() THEN
        RETURN 4;
    END IF;
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    FOR UPDATE;
    IF v_stored.cursor_kind <> 'Snapshot' THEN
        RAISE EXCEPTION 'the checkpoint of % is a pair, cursor %: rewind_processor_checkpoint() moves it',
            p_processor_id, v_stored.cursor_kind USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A row that was deleted has its last counter in the conflict that says so.
    SELECT 1 + greatest(v_stored.last_processed_position, max(f.expected_position), 0) INTO v_counter
    FROM processor_conflicts f
    WHERE f.processor_id = p_processor_id AND f.partition = p_partition AND f.expected_transaction_id = '0';
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind, lower_snapshot,
         upper_snapshot, window_position)
    VALUES (p_processor_id, p_partition, '0', v_counter, 'Snapshot', p_lower, p_upper, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_position = excluded.last_processed_position,
        lower_snapshot = excluded.lower_snapshot,
        upper_snapshot = excluded.upper_snapshot,
        window_position = excluded.window_position,
        stored_at = excluded.stored_at;
    PERFORM keep_checkpoint(p_processor_id, p_partition);
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, '0', v_counter,
            format('%s (window %s .. %s after %s, before it %s .. %s after %s)', p_reason,
                   coalesce(p_lower::text, 'nothing'), coalesce(p_upper::text, '-'), coalesce(p_position::text, '-'),
                   coalesce(v_stored.lower_snapshot::text, 'nothing'), coalesce(v_stored.upper_snapshot::text, '-'),
                   coalesce(v_stored.window_position::text, '-')),
            p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".rewind_processor_checkpoint(
    p_processor_id text, p_partition int, p_transaction_id xid8, p_position bigint, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Put the checkpoint where a person says, back or forward, and record it. 1 done; 4 refused: an owner is live.
-- Cursor Snapshot: the pair 0:POSITION means that every message from that position on is handled again, and none is lost.
DECLARE
    v_back pg_snapshot;
    v_stored processor_checkpoints;
    v_expires timestamptz;
BEGIN
    IF p_transaction_id IS NULL OR p_position IS NULL THEN
        RAISE EXCEPTION 'half a checkpoint: %:%', p_transaction_id, p_position
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Name both parts of the pair, transaction_id and position.';
    END IF;
    INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition) ON CONFLICT DO NOTHING;
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR UPDATE;
    IF v_expires > clock_timestamp() THEN
        RETURN 4;
    END IF;
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    FOR UPDATE;
    IF v_stored.cursor_kind = 'Snapshot' OR v_stored.processor_id IS NULL AND EXISTS (
           SELECT 1 FROM processor_conflicts f WHERE f.processor_id = p_processor_id AND f.partition = p_partition
           AND f.needs_person AND f.resolved_at IS NULL AND f.expected_transaction_id = '0' AND f.expected_position > 0) THEN
        IF p_transaction_id <> '0' THEN
            RAISE EXCEPTION 'the cursor of % is Snapshot: name 0:POSITION, the first position to handle again, not %:%',
                p_processor_id, p_transaction_id, p_position USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF v_stored.processor_id IS NULL AND p_position > 0
           AND EXISTS (SELECT 1 FROM processor_sources s WHERE s.processor_id = p_processor_id) THEN
            RAISE EXCEPTION 'the checkpoint of % is gone, and its messages are in another database: what is committed there is not '
                'known here', p_processor_id
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Name 0:0, and everything is handled again.';
        END IF;
        -- As outbox_core.window.Window.rewound: what is examined shrinks to what is below the position. Where the row is gone,
        -- what is committed by now is all there is to go by.
        v_back := CASE WHEN v_stored.processor_id IS NULL AND p_position <= 0 THEN NULL
                       WHEN v_stored.processor_id IS NULL THEN pg_current_snapshot()
                       WHEN p_position <= v_stored.window_position THEN v_stored.upper_snapshot
                       ELSE v_stored.lower_snapshot END;
        RETURN rewind_processor_window(p_processor_id, p_partition, NULL, v_back,
                                       CASE WHEN v_back IS NOT NULL THEN greatest(p_position, -9223372036854775807) - 1 END,
                                       p_reason, p_decided_by);
    END IF;
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_transaction_id = excluded.last_processed_transaction_id,
        last_processed_position = excluded.last_processed_position,
        stored_at = excluded.stored_at;
    PERFORM keep_checkpoint(p_processor_id, p_partition);
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, p_transaction_id, p_position, p_reason, p_decided_by);
    RETURN 1;
END
$function$;

REVOKE EXECUTE ON FUNCTION
    :"schema".window_seal(pg_snapshot, pg_snapshot, bigint), :"schema".keep_checkpoint(text, int), :"schema".find_edit(text, int),
    :"schema".store_processor_window(text, int, bigint, pg_snapshot, pg_snapshot, bigint, bigint, pg_snapshot, pg_snapshot,
                                     bigint, bigint, uuid),
    :"schema".begin_windows(text, pg_snapshot, pg_snapshot, bigint, int, bigint, uuid),
    :"schema".rewind_processor_window(text, int, pg_snapshot, pg_snapshot, bigint, text, text)
FROM PUBLIC;
