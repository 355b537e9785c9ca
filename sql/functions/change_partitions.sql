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
    -- Rows of leases stay, also those of partitions that are no more: epochs go on rising, now too, so that a former owner
    -- who reports late what it was told opens no conflict (record_refusal).
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch', epoch = l.epoch + 1
    WHERE l.processor_id = p_processor_id;
    -- What is open all the same is about a partition that is not there, or it would have stopped the change.
    UPDATE processor_conflicts f
    SET resolved_at = clock_timestamp(), resolution = 'PartitionGone', decided_by = v_was.asked_by
    WHERE f.processor_id = p_processor_id AND f.needs_person AND f.resolved_at IS NULL;
    -- Anybody may have stored a row for one that is not there.
    DELETE FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition NOT BETWEEN 0 AND v_was.partition_count - 1;
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
    DELETE FROM kept_checkpoints k
    WHERE k.processor_id = p_processor_id AND k.partition NOT BETWEEN 0 AND v_was.next_count - 1;
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
