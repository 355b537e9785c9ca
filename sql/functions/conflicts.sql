-- Conflicts: answers other than 1 that workers were told, and what a user decides about a checkpoint.

CREATE OR REPLACE FUNCTION :"schema".prune_conflicts(p_processor_id text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor keeps its last 1,000 conflicts, and besides each one that waits for a user. What is deleted is counted.
WITH gone AS (
    DELETE FROM processor_conflicts f
    WHERE f.processor_id = p_processor_id AND (NOT f.needs_person OR f.resolved_at IS NOT NULL)
      AND f.id <= (SELECT k.id FROM processor_conflicts k WHERE k.processor_id = p_processor_id
                   ORDER BY k.id DESC OFFSET 1000 LIMIT 1)
    RETURNING f.code
)
INSERT INTO pruned_conflicts AS p (processor_id, code, count)
SELECT p_processor_id, g.code, count(*) FROM gone g GROUP BY g.code ORDER BY g.code
ON CONFLICT (processor_id, code) DO UPDATE SET count = p.count + excluded.count
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
-- A worker whose store was rejected reports it, in a transaction of its own because the rejected one rolls back. The row says
-- who holds the processor at this moment. A report opens no conflict if a successor is owner already: the successor's tamper
-- check (find_tampering) saw whether the row was changed by hand, and a user may have decided by now. Nor does it after a
-- rebalance, which ends every epoch.
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

CREATE OR REPLACE FUNCTION :"schema".resolve_conflict(
    p_conflict_id bigint, p_action text, p_transaction_id xid8, p_position bigint, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A user's decision: 'Accept' goes on from the stored pair, which must be the one that the user saw; 'Rewind' stores
-- the pair given. 1 done, 0 was resolved before, 2 the stored pair is not the one named, 3 no such open conflict, 4 an
-- owner is live. Closes every open conflict of that processor and partition.
DECLARE
    v_conflict processor_conflicts;
    v_stored processor_checkpoints;
BEGIN
    IF p_action IS NULL OR p_action NOT IN ('Accept', 'Rewind') THEN
        RAISE EXCEPTION 'resolve_conflict: % is neither Accept nor Rewind', p_action
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT f.* INTO v_conflict FROM processor_conflicts f WHERE f.id = p_conflict_id FOR UPDATE;
    IF NOT FOUND OR NOT v_conflict.needs_person THEN
        RETURN 3;
    ELSIF v_conflict.resolved_at IS NOT NULL THEN
        RETURN 0;
    END IF;
    IF p_action = 'Rewind' THEN
        IF rewind_processor_checkpoint(v_conflict.processor_id, v_conflict.partition, p_transaction_id, p_position,
                                       format('conflict %s', p_conflict_id), p_decided_by) <> 1 THEN
            RETURN 4;
        END IF;
    ELSE
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = v_conflict.processor_id AND c.partition = v_conflict.partition
        FOR UPDATE;
        IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
           IS DISTINCT FROM (p_transaction_id, p_position) OR v_stored.processor_id IS NULL THEN
            RETURN 2;
        END IF;
        PERFORM store_shadow_checkpoint(v_conflict.processor_id, v_conflict.partition);
        INSERT INTO audit_log (action, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                                   to_position, reason, decided_by)
        VALUES ('Accept', v_conflict.processor_id, v_conflict.partition, v_conflict.expected_transaction_id,
                v_conflict.expected_position, p_transaction_id, p_position,
                format('conflict %s', p_conflict_id), p_decided_by);
    END IF;
    UPDATE processor_conflicts f
    SET resolved_at = clock_timestamp(), resolution = p_action, decided_by = p_decided_by
    WHERE f.processor_id = v_conflict.processor_id AND f.partition = v_conflict.partition
      AND f.needs_person AND f.resolved_at IS NULL;
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".may_move_checkpoint(p_processor_id text, p_partition int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a user move it? False: an owner is live. True: there is none before the caller's transaction ends.
DECLARE
    v_expires timestamptz;
BEGIN
    INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition) ON CONFLICT DO NOTHING;
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR UPDATE;
    IF v_expires > clock_timestamp() THEN
        RETURN false;
    END IF;
    IF EXISTS (SELECT 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id
               AND p_partition NOT BETWEEN 0 AND d.partition_count - 1) THEN
        -- Its row would be in the way of a change to more partitions.
        RAISE EXCEPTION 'processor % has no partition %', p_processor_id, p_partition
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".rewind_processor_checkpoint(
    p_processor_id text, p_partition int, p_transaction_id xid8, p_position bigint, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Put the checkpoint where a user says, back or forward, and record it. 1 done; 4 refused: an owner is live.
-- Cursor Snapshot: the pair 0:POSITION means that every message from that position on is handled again, and none is lost.
DECLARE
    v_back pg_snapshot;
    v_stored processor_checkpoints;
BEGIN
    IF p_transaction_id IS NULL OR p_position IS NULL THEN
        RAISE EXCEPTION 'half a checkpoint: %:%', p_transaction_id, p_position
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Name both parts of the pair, transaction_id and position.';
    END IF;
    IF NOT may_move_checkpoint(p_processor_id, p_partition) THEN
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
        -- As outbox_core.progress.snapshot_range.SnapshotRange.rewound: what is examined shrinks to what is below the position. Where
        -- the row is gone, it is taken that all that is committed by now was examined.
        v_back := CASE WHEN v_stored.processor_id IS NULL AND p_position <= 0 THEN NULL
                       WHEN v_stored.processor_id IS NULL THEN pg_current_snapshot()
                       WHEN p_position <= v_stored.range_position THEN v_stored.upper_snapshot
                       ELSE v_stored.lower_snapshot END;
        RETURN rewind_processor_range(p_processor_id, p_partition, NULL, v_back,
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
    PERFORM store_shadow_checkpoint(p_processor_id, p_partition);
    INSERT INTO audit_log (action, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, p_transaction_id, p_position, p_reason, p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".rewind_processor_range(
    p_processor_id text, p_partition int, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: put the checkpoint to a snapshot range that a user chose, back or forward, and record it. The counter
-- goes on, so that a caller that expects the old one is told 2. 1 done; 4 refused: an owner is live.
DECLARE
    v_stored processor_checkpoints;
    v_counter bigint;
BEGIN
    IF (p_upper IS NULL) <> (p_position IS NULL) THEN
        RAISE EXCEPTION 'half a snapshot range: an upper snapshot goes with a position inside it'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF NOT may_move_checkpoint(p_processor_id, p_partition) THEN
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
         upper_snapshot, range_position)
    VALUES (p_processor_id, p_partition, '0', v_counter, 'Snapshot', p_lower, p_upper, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_position = excluded.last_processed_position,
        lower_snapshot = excluded.lower_snapshot,
        upper_snapshot = excluded.upper_snapshot,
        range_position = excluded.range_position,
        stored_at = excluded.stored_at;
    PERFORM store_shadow_checkpoint(p_processor_id, p_partition);
    INSERT INTO audit_log (action, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, '0', v_counter,
            format('%s (snapshot range %s .. %s after %s, before it %s .. %s after %s)', p_reason,
                   coalesce(p_lower::text, 'nothing'), coalesce(p_upper::text, '-'), coalesce(p_position::text, '-'),
                   coalesce(v_stored.lower_snapshot::text, 'nothing'), coalesce(v_stored.upper_snapshot::text, '-'),
                   coalesce(v_stored.range_position::text, '-')),
            p_decided_by);
    RETURN 1;
END
$function$;
