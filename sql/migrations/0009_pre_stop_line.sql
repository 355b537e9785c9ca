-- Mode Partitioned: the number of partitions can change. A stop line is drawn, every partition stops there, then the number
-- changes and new partitions start there.

ALTER TABLE :"schema".processor_partitions
    ADD COLUMN next_count          int,
    ADD COLUMN line_transaction_id xid8,
    ADD COLUMN line_position       bigint,
    ADD COLUMN asked_at            timestamptz,
    ADD COLUMN asked_uid           text,
    ADD COLUMN asked_generation    bigint,
    ADD COLUMN asked_by            text,
    ADD CONSTRAINT processor_partitions_next_count_is_in_range CHECK (next_count BETWEEN 1 AND 64),
    ADD CONSTRAINT processor_partitions_change_is_whole CHECK (
        (next_count IS NULL) = (line_transaction_id IS NULL)
        AND (next_count IS NULL) = (line_position IS NULL)
        AND (next_count IS NULL) = (asked_at IS NULL));

COMMENT ON COLUMN :"schema".processor_partitions.next_count IS
    'Into how many the processor is to be divided once all partitions have stopped at the line; null: it stays as it is.';
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
#variable_conflict use_column
DECLARE
    v_now processor_partitions;
BEGIN
    SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_now.key = p_key AND p_count BETWEEN 1 AND 64
       AND (v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation) THEN
        PERFORM 1 FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
        IF FOUND THEN
            SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
            IF v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation THEN
                UPDATE processor_partitions d
                SET asked_uid = p_claim_uid, asked_generation = p_generation, asked_by = p_asked_by,
                    next_count = p_count,
                    asked_at = coalesce(d.asked_at, clock_timestamp()),
                    line_transaction_id = coalesce(d.line_transaction_id,
                                                   (pg_current_xact_id()::text::numeric - 1)::text::xid8),
                    line_position = 9223372036854775807
                WHERE d.processor_id = p_processor_id;
                UPDATE processor_partitions d
                SET next_count = NULL, asked_at = NULL, line_transaction_id = NULL, line_position = NULL
                WHERE d.processor_id = p_processor_id AND d.next_count = d.partition_count;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        SELECT d.partition_count, d.key, d.next_count FROM processor_partitions d
        WHERE d.processor_id = p_processor_id;
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
          AND (c.last_processed_transaction_id, c.last_processed_position) = (d.line_transaction_id, d.line_position))
    AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                    WHERE f.processor_id = d.processor_id AND f.partition BETWEEN 0 AND d.partition_count - 1
                      AND f.needs_person AND f.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM held_messages m
                    WHERE m.processor_id = d.processor_id AND m.blocks AND m.error_class IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM dead_letters m WHERE m.processor_id = d.processor_id AND m.blocks)
FROM processor_partitions d
WHERE d.processor_id = p_processor_id
$function$;

CREATE OR REPLACE FUNCTION :"schema".change_partitions(p_processor_id text, p_claim_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Divide the processor as it was asked, if all partitions have stopped at the line: all leases end, so that no former
-- owner can store any more, and the new partitions start at the line. False: not yet, or nothing was asked. Any process
-- of the resource may call it, as often as it likes.
DECLARE
    v_was processor_partitions;
BEGIN
    SELECT d.* INTO v_was FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_was.next_count IS NULL
       OR NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN false;
    END IF;
    IF EXISTS (SELECT 1 FROM processor_checkpoints c
               WHERE c.processor_id = p_processor_id AND c.partition < v_was.partition_count
                 AND (c.last_processed_transaction_id, c.last_processed_position)
                     > (v_was.line_transaction_id, v_was.line_position)
                 AND c.last_processed_transaction_id < pg_snapshot_xmax(pg_current_snapshot())
                 AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                                 WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                                   AND f.needs_person AND f.resolved_at IS NULL)) THEN
        -- A person put a checkpoint beyond the line: it is drawn again where nobody has read yet, and all go on to it.
        UPDATE processor_partitions d SET line_transaction_id = (pg_current_xact_id()::text::numeric - 1)::text::xid8
        WHERE d.processor_id = p_processor_id AND d.line_transaction_id = v_was.line_transaction_id;
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
    DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition >= v_was.next_count;
    INSERT INTO processor_checkpoints (processor_id, partition, last_processed_transaction_id, last_processed_position)
    SELECT p_processor_id, n, v_was.line_transaction_id, v_was.line_position
    FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    PERFORM keep_checkpoint(p_processor_id, n)
    FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    -- What waits for its time goes where its key goes now: all of a key to one partition, in its order.
    UPDATE held_messages m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    UPDATE dead_letters m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    -- Whom an owner may have died of was counted for partitions that are no more.
    DELETE FROM processor_suspicions s WHERE s.processor_id = p_processor_id;
    UPDATE processor_partitions d
    SET partition_count = v_was.next_count, begun_at = clock_timestamp(), next_count = NULL, asked_at = NULL,
        line_transaction_id = NULL, line_position = NULL
    WHERE d.processor_id = p_processor_id;
    INSERT INTO recorded_acts (act, processor_id, to_transaction_id, to_position, reason, decided_by)
    VALUES ('ChangePartitions', p_processor_id, v_was.line_transaction_id, v_was.line_position,
            format('%s partitions became %s', v_was.partition_count, v_was.next_count), v_was.asked_by);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;  -- somebody is committing, or frozen: the next call
END
$function$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text) TO PUBLIC;
