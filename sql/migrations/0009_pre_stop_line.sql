-- Mode Partitioned: the number of partitions can change. A stop line is drawn, every partition stops there, then the number
-- changes and new partitions start there. Of pairs the line is a pair, of the cursor Snapshot a snapshot.

ALTER TABLE :"schema".processor_partitions
    ADD COLUMN next_count          int,
    ADD COLUMN line_transaction_id xid8,
    ADD COLUMN line_position       bigint,
    ADD COLUMN line_mark           xid8,
    ADD COLUMN line_snapshot       pg_snapshot,
    ADD COLUMN asked_at            timestamptz,
    ADD COLUMN asked_uid           text,
    ADD COLUMN asked_generation    bigint,
    ADD COLUMN asked_by            text,
    ADD CONSTRAINT processor_partitions_next_count_is_in_range CHECK (next_count BETWEEN 1 AND 64),
    ADD CONSTRAINT processor_partitions_change_is_whole CHECK (
        (next_count IS NULL) = (asked_at IS NULL)
        AND (next_count IS NULL) = (num_nonnulls(line_transaction_id, line_mark) = 0)
        AND num_nonnulls(line_transaction_id, line_mark) < 2
        AND (line_transaction_id IS NULL) = (line_position IS NULL)
        AND (line_snapshot IS NULL OR line_mark IS NOT NULL));

COMMENT ON COLUMN :"schema".processor_partitions.next_count IS
    'Into how many the processor is to be divided once all partitions have stopped at the line; null: it stays as it is.';
COMMENT ON COLUMN :"schema".processor_partitions.line_mark IS
    'Cursor Snapshot: the transaction that asked for the change. A window that sees it was opened by somebody who can know of the change.';
COMMENT ON COLUMN :"schema".processor_partitions.line_snapshot IS
    'Cursor Snapshot: the stop line, which sees line_mark; null until it is drawn.';
COMMENT ON COLUMN :"schema".processor_partitions.asked_generation IS
    'Of the resource asked_uid, the generation whose number of partitions was last heeded: an older one changes nothing.';

CREATE OR REPLACE FUNCTION :"schema".ask_partitions(
    p_processor_id text, p_claim_uid text, p_generation bigint, p_count int, p_key text, p_asked_by text
) RETURNS TABLE (partition_count int, key text, next_count int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process says into how many partitions its resource wants the processor divided. Another number than there is draws
-- the stop line, in all partitions at once; the number there is takes an unfinished change back. A process that was
-- started from an older text of the resource changes nothing. Answers how the processor is divided; no row: it is not.
--
-- The line is just below this transaction's own id. Whoever reads without seeing the line sees this transaction open:
-- the reading bound keeps such a reader below the line. So nobody has read beyond it, and nobody needs to be waited for.
--
-- Cursor Snapshot has no such order. This transaction's id is the line's mark: whoever reads without seeing the wish has a
-- window that does not see the mark. The line is a snapshot that does, drawn once this is committed: draw_snapshot_line.
#variable_conflict use_column
DECLARE
    v_now processor_partitions;
    v_windows boolean;
BEGIN
    SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_now.key = p_key AND p_count BETWEEN 1 AND 64
       AND (v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation) THEN
        PERFORM 1 FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
        IF FOUND THEN
            SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
            IF v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation THEN
                v_windows := EXISTS (SELECT 1 FROM processor_checkpoints c
                                     WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'Snapshot');
                UPDATE processor_partitions d
                SET asked_uid = p_claim_uid, asked_generation = p_generation, asked_by = p_asked_by,
                    next_count = p_count,
                    asked_at = coalesce(d.asked_at, clock_timestamp()),
                    line_mark = CASE WHEN v_windows THEN coalesce(d.line_mark, pg_current_xact_id()) END,
                    line_transaction_id = CASE WHEN NOT v_windows THEN
                        coalesce(d.line_transaction_id, (pg_current_xact_id()::text::numeric - 1)::text::xid8) END,
                    line_position = CASE WHEN NOT v_windows THEN 9223372036854775807 END
                WHERE d.processor_id = p_processor_id;
                UPDATE processor_partitions d
                SET next_count = NULL, asked_at = NULL, line_transaction_id = NULL, line_position = NULL,
                    line_mark = NULL, line_snapshot = NULL
                WHERE d.processor_id = p_processor_id AND d.next_count = d.partition_count;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        SELECT d.partition_count, d.key, d.next_count FROM processor_partitions d
        WHERE d.processor_id = p_processor_id;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".draw_snapshot_line(p_processor_id text, p_claim_uid text) RETURNS pg_snapshot
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: draw the stop line of a change that was asked for, once; any process of the resource may call it, as
-- often as it likes. Answers the line; null: there is none, or somebody else is drawing it now.
--
-- Later snapshots see all that earlier ones see. A reader's window that does not see the mark is older than the mark's
-- commit; a line that sees it is younger. So the line holds every window that was read without knowing of the change.
-- Taken before that commit (by the asking transaction itself) it would not: a window could be opened in between.
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN NULL;
    END IF;
    PERFORM 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
    -- A statement of its own: a snapshot taken before the lock might not see the mark that the row has by now.
    UPDATE processor_partitions d SET line_snapshot = pg_current_snapshot()
    WHERE d.processor_id = p_processor_id AND d.line_snapshot IS NULL
      AND d.line_mark <> pg_current_xact_id() AND pg_visible_in_snapshot(d.line_mark, pg_current_snapshot());
    RETURN (SELECT d.line_snapshot FROM processor_partitions d WHERE d.processor_id = p_processor_id);
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".partitions_are_at_line(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May the number of partitions change now? Every partition's checkpoint is at the stop line, no conflict waits for a
-- person, and no key is blocked: by a message that failed and is held, or by a dead letter.
SELECT d.next_count IS NOT NULL
    AND d.partition_count = (
        SELECT count(*) FROM processor_checkpoints c
        WHERE c.processor_id = d.processor_id AND c.partition BETWEEN 0 AND d.partition_count - 1
          AND CASE WHEN d.line_mark IS NULL
                   THEN (c.last_processed_transaction_id, c.last_processed_position)
                        = (d.line_transaction_id, d.line_position)
                   ELSE c.lower_snapshot::text = d.line_snapshot::text AND c.upper_snapshot IS NULL END)
    AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                    WHERE f.processor_id = d.processor_id AND f.partition BETWEEN 0 AND d.partition_count - 1
                      AND f.needs_person AND f.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM held_messages m
                    WHERE m.processor_id = d.processor_id AND m.blocks AND m.error_class IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM dead_letters m WHERE m.processor_id = d.processor_id AND m.blocks)
FROM processor_partitions d
WHERE d.processor_id = p_processor_id
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_beyond_line(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Did a person put a checkpoint beyond the stop line, and is done with it? No worker can. A window is beyond if it sees the
-- mark and does not end at the line itself. What lies beyond the server's own transaction ids is no place to wait for.
SELECT EXISTS (
    SELECT 1
    FROM processor_partitions d
    JOIN processor_checkpoints c ON c.processor_id = d.processor_id AND c.partition < d.partition_count
    CROSS JOIN LATERAL (SELECT coalesce(c.upper_snapshot, c.lower_snapshot) AS snapshot) AS w
    WHERE d.processor_id = p_processor_id
      AND CASE WHEN d.line_mark IS NULL
          THEN (c.last_processed_transaction_id, c.last_processed_position) > (d.line_transaction_id, d.line_position)
               AND c.last_processed_transaction_id < pg_snapshot_xmax(pg_current_snapshot())
          ELSE pg_visible_in_snapshot(d.line_mark, w.snapshot)
               AND w.snapshot::text IS DISTINCT FROM d.line_snapshot::text
               AND pg_snapshot_xmax(w.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) END
      AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                      WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                        AND f.needs_person AND f.resolved_at IS NULL))
$function$;

CREATE OR REPLACE FUNCTION :"schema".change_partitions(p_processor_id text, p_claim_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Divide the processor as it was asked, if all partitions have stopped at the line: all leases end, so that no former
-- owner can store any more, and the new partitions start at the line. False: not yet, or nothing was asked. Any process
-- of the resource may call it, as often as it likes.
DECLARE
    v_was processor_partitions;
    v_counter bigint;
BEGIN
    SELECT d.* INTO v_was FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_was.next_count IS NULL
       OR NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN false;
    END IF;
    IF is_beyond_line(p_processor_id) THEN
        -- A person put a checkpoint beyond the line: it is drawn again where nobody has read yet, and all go on to it.
        UPDATE processor_partitions d
        SET line_transaction_id = CASE WHEN d.line_mark IS NULL
                                       THEN (pg_current_xact_id()::text::numeric - 1)::text::xid8 END,
            line_mark = CASE WHEN d.line_mark IS NOT NULL THEN pg_current_xact_id() END,
            line_snapshot = NULL
        WHERE d.processor_id = p_processor_id
          AND coalesce(d.line_transaction_id, d.line_mark) = coalesce(v_was.line_transaction_id, v_was.line_mark);
        RETURN false;
    END IF;
    IF NOT coalesce(partitions_are_at_line(p_processor_id), false) THEN
        RETURN false;
    END IF;
    -- Locks in the order of claim_processor. A lease row that is locked has no owner who is storing.
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT d.* INTO v_was FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
    PERFORM 1 FROM processor_leases l WHERE l.processor_id = p_processor_id ORDER BY l.partition FOR UPDATE;
    PERFORM 1 FROM processor_checkpoints c WHERE c.processor_id = p_processor_id ORDER BY c.partition FOR UPDATE;
    IF NOT coalesce(partitions_are_at_line(p_processor_id), false) THEN
        RETURN false;
    END IF;
    -- Rows of leases stay, also those of partitions that are no more: epochs go on rising.
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id;
    IF v_was.line_mark IS NULL THEN
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        SELECT p_processor_id, n, v_was.line_transaction_id, v_was.line_position
        FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    ELSE
        -- One counter for all, above every former one: so a partition's counter never falls, even if it is gone for a time.
        SELECT max(c.last_processed_position) + 1 INTO v_counter
        FROM processor_checkpoints c WHERE c.processor_id = p_processor_id;
        UPDATE processor_checkpoints c SET last_processed_position = v_counter, stored_at = clock_timestamp()
        WHERE c.processor_id = p_processor_id;
        INSERT INTO processor_checkpoints (processor_id, partition, last_processed_transaction_id,
                                           last_processed_position, cursor_kind, lower_snapshot)
        SELECT p_processor_id, n, '0', v_counter, 'Snapshot', v_was.line_snapshot
        FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    END IF;
    DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition >= v_was.next_count;
    PERFORM keep_checkpoint(p_processor_id, NULL);
    -- What waits for its time goes where its key goes now: all of a key to one partition, in its order.
    UPDATE held_messages m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    UPDATE dead_letters m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    -- Whom an owner may have died of was counted for partitions that are no more.
    DELETE FROM processor_suspicions s WHERE s.processor_id = p_processor_id;
    UPDATE processor_partitions d
    SET partition_count = v_was.next_count, begun_at = clock_timestamp(), next_count = NULL, asked_at = NULL,
        line_transaction_id = NULL, line_position = NULL, line_mark = NULL, line_snapshot = NULL
    WHERE d.processor_id = p_processor_id;
    INSERT INTO recorded_acts (act, processor_id, to_transaction_id, to_position, reason, decided_by)
    VALUES ('ChangePartitions', p_processor_id, coalesce(v_was.line_transaction_id, '0'),
            coalesce(v_was.line_position, v_counter),
            format('%s partitions became %s', v_was.partition_count, v_was.next_count)
                || coalesce(format(' (after the snapshot %s)', v_was.line_snapshot), ''), v_was.asked_by);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;  -- somebody is committing, or frozen: the next call
END
$function$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text) TO PUBLIC;
