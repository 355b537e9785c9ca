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
