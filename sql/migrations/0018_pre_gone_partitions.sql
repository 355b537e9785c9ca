-- A partition that is gone can be neither leased nor waited for: nothing that comes late leaves a conflict on it.

CREATE OR REPLACE FUNCTION :"schema".acquire_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (acquired boolean, epoch bigint, pod text, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A fresh epoch for the process that holds `p_token`. Refused: another process is alive, the claim is another's, a
-- conflict waits for a person, or the former owner is committing at this moment. Answers who holds the lease after the call;
-- no epoch, where the processor has no such partition (any more): the caller's division is old.
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
            -- Against a change of their number, which begins by locking this row. Nothing to lock: it is not divided.
            PERFORM 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR KEY SHARE;
            IF EXISTS (SELECT 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id
                       AND p_partition NOT BETWEEN 0 AND d.partition_count - 1) THEN
                RETURN QUERY SELECT false, NULL::bigint, NULL::text, NULL::timestamptz;
                RETURN;
            END IF;
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

CREATE OR REPLACE FUNCTION :"schema".record_refusal(
    p_processor_id text, p_partition int, p_code int,
    p_expected_transaction_id xid8, p_expected_position bigint,
    p_stored_transaction_id xid8, p_stored_position bigint,
    p_new_transaction_id xid8, p_new_position bigint,
    p_epoch bigint, p_pod text, p_claim_uid text, p_needs_person boolean
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A refused worker reports itself, in a transaction of its own because the refused one rolls back. Notes who holds the
-- processor at this moment. Late, when a successor was owner already, it opens nothing: who loaded the row since saw by its
-- copy (find_edit) whether somebody edited it, and a person may have decided by now. Nor after a change of the number of
-- partitions, which ends every epoch and is waited for.
DECLARE
    v_id bigint;
BEGIN
    IF p_needs_person THEN
        PERFORM 1 FROM processor_leases s
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition FOR KEY SHARE;
    END IF;
    INSERT INTO processor_conflicts (
        processor_id, partition, code, expected_transaction_id, expected_position, stored_transaction_id,
        stored_position, new_transaction_id, new_position, epoch, pod, claim_uid, needs_person,
        holder_cluster, holder_namespace, holder_name, holder_uid, holder_pod)
    SELECT p_processor_id, p_partition, p_code, p_expected_transaction_id, p_expected_position, p_stored_transaction_id,
           p_stored_position, p_new_transaction_id, p_new_position, p_epoch, p_pod, p_claim_uid,
           p_needs_person AND NOT EXISTS (
               SELECT 1 FROM processor_leases s
               WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.epoch > p_epoch),
           c.cluster, c.namespace, c.name, c.uid, l.pod
    FROM (VALUES (p_processor_id, p_partition)) AS asked (processor_id, partition)
    LEFT JOIN processor_claims c ON c.processor_id = asked.processor_id
    LEFT JOIN processor_leases l ON l.processor_id = asked.processor_id AND l.partition = asked.partition
                                AND l.expires_at > clock_timestamp()
    RETURNING id INTO v_id;
    PERFORM prune_conflicts(p_processor_id);
    RETURN v_id;
END
$function$;

-- What former versions left: conflicts that no command could decide, rows that are missed though nobody deleted them.
UPDATE :"schema".processor_conflicts f
SET resolved_at = clock_timestamp(), resolution = 'PartitionGone', decided_by = 'migration 0018'
FROM :"schema".processor_partitions d
WHERE d.processor_id = f.processor_id AND f.partition NOT BETWEEN 0 AND d.partition_count - 1
  AND f.needs_person AND f.resolved_at IS NULL;

DELETE FROM :"schema".kept_checkpoints k
USING :"schema".processor_partitions d
WHERE d.processor_id = k.processor_id AND k.partition NOT BETWEEN 0 AND d.partition_count - 1;
