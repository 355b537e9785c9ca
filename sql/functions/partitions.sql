-- Mode Partitioned: keys and partitions, members, and a change of the number of partitions.

CREATE OR REPLACE FUNCTION :"schema".hash_slot(p_key text) RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE COST 4000
AS $function$
-- Of 64 slots the one of a key: the first byte of SHA-256 over its UTF-8 bytes, modulo 64. Partition p of N has the
-- slots s with s % N = p. Indexes are built on it: it can never change.
--
-- The cost tells the planner that a call takes longer than to read a page at random (4000 * cpu_operator_cost is 10,
-- random_page_cost is 4). So it reads a partition by the index of slots, with any statistics: by any other index it
-- must call this for each row.
    SELECT pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.convert_to(p_key, 'UTF8')), 0) OPERATOR(pg_catalog.&) 63
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_partitions(
    p_processor_id text, p_count int, p_key text, p_transaction_id xid8, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, partition_count int, key text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first owner of any partition writes down the partitioning of the processor and the one pair from which all of it
-- starts: a partition that is first owned later must not start later. Every other caller learns what was written.
-- No row (partition_count null): the processor has a checkpoint but was never partitioned.
#variable_conflict use_column
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    begun := false;
    IF owned AND p_transaction_id IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE c.processor_id = p_processor_id) THEN
        -- Of two at once, the other waits here until this one committed.
        INSERT INTO processor_partitions (processor_id, partition_count, key)
        VALUES (p_processor_id, p_count, p_key) ON CONFLICT DO NOTHING;
        begun := FOUND;
        IF begun THEN
            INSERT INTO processor_checkpoints
                (processor_id, partition, last_processed_transaction_id, last_processed_position)
            SELECT p_processor_id, n, p_transaction_id, p_position FROM generate_series(0, p_count - 1) AS n
            ON CONFLICT DO NOTHING;
            PERFORM store_shadow_checkpoint(p_processor_id, NULL);
        END IF;
    END IF;
    SELECT d.partition_count, d.key INTO partition_count, key
    FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".renew_membership(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (partition int, epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat of a process that owns some of the partitions: it is one of the members that share them, and so long it
-- keeps what it owns. Both lapse together. Returned: the leases that are still its own.
#variable_conflict use_column
BEGIN
    INSERT INTO processor_members AS m (processor_id, token, pod, claim_uid, expires_at)
    SELECT p_processor_id, p_token, p_pod, p_claim_uid, clock_timestamp() + p_lease
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE SET expires_at = clock_timestamp() + p_lease;
    DELETE FROM processor_members m
    USING (SELECT g.token FROM processor_members g
           WHERE g.processor_id = p_processor_id AND g.expires_at < clock_timestamp() - p_lease
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE m.processor_id = p_processor_id AND m.token = gone.token;
    -- In the order of those who end several leases (end_leases, change_partitions).
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.token = p_token ORDER BY l.partition FOR NO KEY UPDATE;
    RETURN QUERY
        UPDATE processor_leases l
        SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease
        WHERE l.processor_id = p_processor_id AND l.token = p_token AND l.expires_at > clock_timestamp()
        RETURNING l.partition, l.epoch;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".end_membership(p_processor_id text, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process leaves: its partitions are free at once, and the other members share them.
BEGIN
    DELETE FROM processor_members m WHERE m.processor_id = p_processor_id AND m.token = p_token;
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.token = p_token ORDER BY l.partition FOR NO KEY UPDATE;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.token = p_token;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".ask_partitions(
    p_processor_id text, p_claim_uid text, p_generation bigint, p_count int, p_key text, p_asked_by text
) RETURNS TABLE (partition_count int, key text, next_count int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process says how many partitions its resource wants. Another number than there is draws the barrier, in all partitions
-- at once; the number there is takes an unfinished rebalance back. A process that was started from an older text of the
-- resource changes nothing. Answers the partitioning; no row: there is none.
--
-- The barrier is just below this transaction's own id. A reader that does not see the barrier sees this transaction open:
-- the high-water mark keeps that reader below the barrier. So no worker has read beyond it, and we wait for none.
--
-- Cursor Snapshot has no such order. This transaction's id is the barrier's mark: a reader that does not see the wish has a
-- snapshot range that does not see the mark. The barrier is a snapshot that does, drawn once this is committed:
-- draw_snapshot_barrier.
#variable_conflict use_column
DECLARE
    v_now processor_partitions;
    v_snapshot boolean;
BEGIN
    SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_now.key = p_key AND p_count BETWEEN 1 AND 64
       AND (v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation) THEN
        PERFORM 1 FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
        IF FOUND THEN
            SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
            IF v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation THEN
                v_snapshot := EXISTS (SELECT 1 FROM processor_checkpoints c
                                     WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'Snapshot');
                UPDATE processor_partitions d
                SET asked_uid = p_claim_uid, asked_generation = p_generation, asked_by = p_asked_by,
                    next_count = p_count,
                    asked_at = coalesce(d.asked_at, clock_timestamp()),
                    barrier_mark = CASE WHEN v_snapshot THEN coalesce(d.barrier_mark, pg_current_xact_id()) END,
                    barrier_transaction_id = CASE WHEN NOT v_snapshot THEN
                        coalesce(d.barrier_transaction_id, (pg_current_xact_id()::text::numeric - 1)::text::xid8) END,
                    barrier_position = CASE WHEN NOT v_snapshot THEN 9223372036854775807 END
                WHERE d.processor_id = p_processor_id;
                UPDATE processor_partitions d
                SET next_count = NULL, asked_at = NULL, barrier_transaction_id = NULL, barrier_position = NULL,
                    barrier_mark = NULL, barrier_snapshot = NULL
                WHERE d.processor_id = p_processor_id AND d.next_count = d.partition_count;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        SELECT d.partition_count, d.key, d.next_count FROM processor_partitions d
        WHERE d.processor_id = p_processor_id;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".draw_snapshot_barrier(p_processor_id text, p_claim_uid text) RETURNS pg_snapshot
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: draw the barrier of a rebalance that was asked for, once; any process of the resource may call it, as
-- often as it likes. Answers the barrier; null: there is none, or another process is drawing it now.
--
-- Later snapshots see all that earlier ones see. A reader's snapshot range that does not see the mark is older than the mark's
-- commit; a barrier that sees it is younger. So the barrier covers every range that was read without knowing of the
-- rebalance. A barrier taken before that commit (by the asking transaction itself) would not: a range could begin in between.
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN NULL;
    END IF;
    PERFORM 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
    -- A statement of its own: a snapshot taken before the lock might not see the mark that the row has by now.
    UPDATE processor_partitions d SET barrier_snapshot = pg_current_snapshot()
    WHERE d.processor_id = p_processor_id AND d.barrier_snapshot IS NULL
      AND d.barrier_mark <> pg_current_xact_id() AND pg_visible_in_snapshot(d.barrier_mark, pg_current_snapshot());
    RETURN (SELECT d.barrier_snapshot FROM processor_partitions d WHERE d.processor_id = p_processor_id);
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".partitions_are_at_barrier(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May the number of partitions change now? Every partition's checkpoint is at the barrier, no conflict waits for a user,
-- and no key is blocked: by a message that failed and is held, or by a dead letter.
SELECT d.next_count IS NOT NULL
    AND d.partition_count = (
        SELECT count(*) FROM processor_checkpoints c
        WHERE c.processor_id = d.processor_id AND c.partition BETWEEN 0 AND d.partition_count - 1
          AND CASE WHEN d.barrier_mark IS NULL
                   THEN (c.last_processed_transaction_id, c.last_processed_position)
                        = (d.barrier_transaction_id, d.barrier_position)
                   ELSE c.lower_snapshot::text = d.barrier_snapshot::text AND c.upper_snapshot IS NULL END)
    AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                    WHERE f.processor_id = d.processor_id AND f.partition BETWEEN 0 AND d.partition_count - 1
                      AND f.needs_person AND f.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM held_messages m
                    WHERE m.processor_id = d.processor_id AND m.blocks AND m.error_class IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM dead_letters m WHERE m.processor_id = d.processor_id AND m.blocks)
FROM processor_partitions d
WHERE d.processor_id = p_processor_id
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_beyond_barrier(p_processor_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a checkpoint beyond the barrier, and no decision about it open? Only a user can put it there. A snapshot range is beyond
-- if it sees the mark and does not end at the barrier itself. What lies beyond the server's own transaction ids does not count.
SELECT EXISTS (
    SELECT 1
    FROM processor_partitions d
    JOIN processor_checkpoints c ON c.processor_id = d.processor_id AND c.partition < d.partition_count
    CROSS JOIN LATERAL (SELECT coalesce(c.upper_snapshot, c.lower_snapshot) AS snapshot) AS w
    WHERE d.processor_id = p_processor_id
      AND CASE WHEN d.barrier_mark IS NULL
          THEN (c.last_processed_transaction_id, c.last_processed_position) > (d.barrier_transaction_id, d.barrier_position)
               AND c.last_processed_transaction_id < pg_snapshot_xmax(pg_current_snapshot())
          ELSE pg_visible_in_snapshot(d.barrier_mark, w.snapshot)
               AND w.snapshot::text IS DISTINCT FROM d.barrier_snapshot::text
               AND pg_snapshot_xmax(w.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) END
      AND NOT EXISTS (SELECT 1 FROM processor_conflicts f
                      WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                        AND f.needs_person AND f.resolved_at IS NULL))
$function$;

CREATE OR REPLACE FUNCTION :"schema".change_partitions(p_processor_id text, p_claim_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Rebalance the processor as it was asked, if all partitions have stopped at the barrier: all leases end, so that no former
-- owner can store any more, and the new partitions start at the barrier. False: not yet, or nothing was asked. Any process
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
    IF is_beyond_barrier(p_processor_id) THEN
        -- A user put a checkpoint beyond the barrier: it is drawn again where no worker has read yet, and all go on to it.
        UPDATE processor_partitions d
        SET barrier_transaction_id = CASE WHEN d.barrier_mark IS NULL
                                       THEN (pg_current_xact_id()::text::numeric - 1)::text::xid8 END,
            barrier_mark = CASE WHEN d.barrier_mark IS NOT NULL THEN pg_current_xact_id() END,
            barrier_snapshot = NULL
        WHERE d.processor_id = p_processor_id
          AND coalesce(d.barrier_transaction_id, d.barrier_mark) = coalesce(v_was.barrier_transaction_id, v_was.barrier_mark);
        RETURN false;
    END IF;
    IF NOT coalesce(partitions_are_at_barrier(p_processor_id), false) THEN
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
    IF NOT coalesce(partitions_are_at_barrier(p_processor_id), false) THEN
        RETURN false;
    END IF;
    -- Rows of leases stay, also those of partitions that are no more: epochs go on rising, now too, so that a former owner
    -- who reports late what it was told opens no conflict (record_refusal).
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch', epoch = l.epoch + 1
    WHERE l.processor_id = p_processor_id;
    -- A conflict that is open now is about a partition that is not there, or it would have stopped the rebalance.
    UPDATE processor_conflicts f
    SET resolved_at = clock_timestamp(), resolution = 'PartitionGone', decided_by = v_was.asked_by
    WHERE f.processor_id = p_processor_id AND f.needs_person AND f.resolved_at IS NULL;
    -- A user may have stored a row for a partition that is not there.
    DELETE FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition NOT BETWEEN 0 AND v_was.partition_count - 1;
    IF v_was.barrier_mark IS NULL THEN
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        SELECT p_processor_id, n, v_was.barrier_transaction_id, v_was.barrier_position
        FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    ELSE
        -- One counter for all, above every former one: so a partition's counter never falls, even if it is gone for a time.
        SELECT max(c.last_processed_position) + 1 INTO v_counter
        FROM processor_checkpoints c WHERE c.processor_id = p_processor_id;
        UPDATE processor_checkpoints c SET last_processed_position = v_counter, stored_at = clock_timestamp()
        WHERE c.processor_id = p_processor_id;
        INSERT INTO processor_checkpoints (processor_id, partition, last_processed_transaction_id,
                                           last_processed_position, cursor_kind, lower_snapshot)
        SELECT p_processor_id, n, '0', v_counter, 'Snapshot', v_was.barrier_snapshot
        FROM generate_series(v_was.partition_count, v_was.next_count - 1) AS n;
    END IF;
    DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition >= v_was.next_count;
    DELETE FROM shadow_checkpoints k
    WHERE k.processor_id = p_processor_id AND k.partition NOT BETWEEN 0 AND v_was.next_count - 1;
    PERFORM store_shadow_checkpoint(p_processor_id, NULL);
    -- What waits for its time goes where its key goes now: all of a key to one partition, in its order.
    UPDATE held_messages m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    UPDATE dead_letters m SET partition = hash_slot(coalesce(m.key, m.message_id)) % v_was.next_count
    WHERE m.processor_id = p_processor_id;
    -- The crash counts are those of partitions that are no more.
    DELETE FROM processor_crashes s WHERE s.processor_id = p_processor_id;
    UPDATE processor_partitions d
    SET partition_count = v_was.next_count, begun_at = clock_timestamp(), next_count = NULL, asked_at = NULL,
        barrier_transaction_id = NULL, barrier_position = NULL, barrier_mark = NULL, barrier_snapshot = NULL
    WHERE d.processor_id = p_processor_id;
    INSERT INTO audit_log (action, processor_id, to_transaction_id, to_position, reason, decided_by)
    VALUES ('ChangePartitions', p_processor_id, coalesce(v_was.barrier_transaction_id, '0'),
            coalesce(v_was.barrier_position, v_counter),
            format('%s partition%s became %s', v_was.partition_count,
                   CASE WHEN v_was.partition_count <> 1 THEN 's' END, v_was.next_count)
                || coalesce(format(' (after the snapshot %s)', v_was.barrier_snapshot), ''), v_was.asked_by);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;  -- an owner is committing, or frozen: the next call
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".has_just_partitioned(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is the caller the owner whose own transaction partitioned the processor (begin_partitions)? No worker has read from its starts.
SELECT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) AND EXISTS (
    SELECT 1 FROM processor_partitions d
    WHERE d.processor_id = p_processor_id AND d.xmin = pg_current_xact_id()::xid)
$function$;

CREATE OR REPLACE FUNCTION :"schema".spread_start(
    p_processor_id text, p_partitions int[], p_transaction_ids xid8[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Each partition starts at a pair of its own: only in the transaction that partitioned the processor (begin_partitions), and
-- never before the pair that all of them were given there.
BEGIN
    IF NOT has_just_partitioned(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n."position"
    FROM unnest(p_partitions, p_transaction_ids, p_positions) AS n (partition, transaction_id, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition
      AND (n.transaction_id, n."position") > (c.last_processed_transaction_id, c.last_processed_position);
    PERFORM store_shadow_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".spread_ranges(
    p_processor_id text, p_partitions int[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- As spread_start, for the cursor Snapshot: after begin_ranges, in the transaction that partitioned the processor.
BEGIN
    IF NOT has_just_partitioned(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, range_position = n."position"
    FROM unnest(p_partitions, p_lowers, p_uppers, p_positions) AS n (partition, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition AND c.cursor_kind = 'Snapshot';
    PERFORM store_shadow_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;
