-- Leases: which process works on a partition, crash counts of its messages, and what each process last said of itself.

CREATE OR REPLACE FUNCTION :"schema".holds_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is this epoch and token the live owner's? If so the lease row stays locked FOR KEY SHARE to the end of the caller's
-- transaction: that conflicts with a takeover (FOR UPDATE), not with the heartbeat (an update of other columns).
DECLARE
    v_lease processor_leases;
BEGIN
    IF p_epoch IS NULL OR p_owner_token IS NULL THEN
        RETURN false;
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        -- A lease that the snapshot cannot see: the insert fails with 40001 instead of answering from the past.
        INSERT INTO processor_leases (processor_id, partition) VALUES (p_processor_id, p_partition)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM processor_leases l WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
            RETURN false;
        END IF;
    ELSE
        -- A caller that is not the owner leaves no lock behind.
        PERFORM 1 FROM processor_leases l
        WHERE l.processor_id = p_processor_id AND l.partition = p_partition
          AND l.epoch = p_epoch AND l.token = p_owner_token AND l.expires_at > clock_timestamp();
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    SELECT l.* INTO v_lease FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
    FOR KEY SHARE;
    RETURN coalesce(
        v_lease.epoch = p_epoch AND v_lease.token = p_owner_token AND v_lease.expires_at > clock_timestamp(), false);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".keep_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid, p_lease interval
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Right before a batch is handed over: is the lease ours, with four fifths of its time or more? Renewed only where it has
-- less: an update for each batch would leave as many dead rows.
DECLARE
    v_expires timestamptz;
BEGIN
    SELECT l.expires_at INTO v_expires FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition AND l.epoch = p_epoch AND l.token = p_token
      AND l.expires_at > clock_timestamp();
    RETURN FOUND AND (v_expires > clock_timestamp() + p_lease * 0.8
                      OR renew_lease(p_processor_id, p_partition, p_epoch, p_token, p_lease));
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".end_leases(p_processor_id text, p_keep_claim_uid text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A claim that changes hands ends the leases of its former holder. Waits for a checkpoint that is being committed.
BEGIN
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.claim_uid IS DISTINCT FROM p_keep_claim_uid
    ORDER BY l.partition
    FOR UPDATE;
    UPDATE processor_leases l
    SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.claim_uid IS DISTINCT FROM p_keep_claim_uid;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_in_flight(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_generation bigint, p_in_flight int
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Two owners died at this checkpoint: write down how many messages are in flight now, before they are tried; the last one is
-- the one named. -1: not the owner. Else the crash count of this very message, which was tried alone.
DECLARE
    v_alone int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    INSERT INTO processor_crashes AS s
        (processor_id, partition, transaction_id, position, begun_at, generation, in_flight)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position, clock_timestamp(), p_generation, p_in_flight)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET transaction_id = p_transaction_id, position = p_position, begun_at = clock_timestamp(),
        generation = p_generation, in_flight = p_in_flight,
        crash_count_alone = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.crash_count_alone ELSE 0 END,
        counted_alone_tokens = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.counted_alone_tokens
                             ELSE '{}' END
    RETURNING s.crash_count_alone INTO v_alone;
    RETURN v_alone;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".end_in_flight(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What begin_in_flight or take_due_messages wrote down was tried, and the process lives: a later crash of it is not counted
-- for these messages.
UPDATE processor_crashes s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
WHERE s.processor_id = p_processor_id AND s.partition = p_partition
  AND holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token)
$function$;

CREATE OR REPLACE FUNCTION :"schema".count_crash(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Called with a new epoch, once: the former owner gave the lease back (p_token null), or it lapsed and its process is gone,
-- frozen, or cut off; if it comes again, its crash is not counted any more (uncount_crash).
-- Crashes count while the checkpoint stays where it is; those of a message only where it was tried alone, or was held. A
-- process that died while messages were in flight leaves them written down for its successor.
DECLARE
    v_at timestamptz;
    v_alone uuid[];
BEGIN
    IF p_token IS NULL THEN
        UPDATE processor_crashes s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
        RETURN;
    END IF;
    SELECT c.stored_at INTO v_at FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
    UPDATE held_messages h SET crash_count = h.crash_count + 1
    FROM processor_crashes s, unnest(s.held_transaction_ids, s.held_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position;
    -- What was tried alone and not stored since.
    SELECT ARRAY[p_token] INTO v_alone FROM processor_crashes s
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND s.in_flight = 1 AND s.begun_at > coalesce(v_at, '-infinity');
    INSERT INTO processor_crashes AS s (processor_id, partition, crash_count, checkpoint_at, counted_tokens)
    VALUES (p_processor_id, p_partition, 1, v_at, ARRAY[p_token])
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET crash_count = CASE WHEN s.checkpoint_at = v_at THEN s.crash_count + 1 ELSE 1 END,
        checkpoint_at = v_at,
        counted_tokens = CASE WHEN s.checkpoint_at = v_at THEN s.counted_tokens || p_token ELSE ARRAY[p_token] END,
        in_flight = CASE WHEN s.begun_at > coalesce(v_at, '-infinity') THEN s.in_flight ELSE 0 END,
        crash_count_alone = s.crash_count_alone + coalesce(cardinality(v_alone), 0),
        counted_alone_tokens = s.counted_alone_tokens || v_alone,
        crashed_alone_at = CASE WHEN v_alone IS NULL THEN s.crashed_alone_at ELSE clock_timestamp() END,
        crashed_token = CASE WHEN s.held_positions = '{}' THEN s.crashed_token ELSE p_token END,
        crashed_transaction_ids = CASE WHEN s.held_positions = '{}' THEN s.crashed_transaction_ids ELSE s.held_transaction_ids END,
        crashed_positions = CASE WHEN s.held_positions = '{}' THEN s.crashed_positions ELSE s.held_positions END,
        begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}';
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".uncount_crash(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A process that was counted as crashed and calls again was frozen, cut off, or waiting: no message killed it. Of a held
-- message we know only the process of its latest crash. Under the lock of the lease, as all who count. An owner that is
-- committing is not waited for: the process will call again.
BEGIN
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
      AND EXISTS (SELECT 1 FROM processor_crashes s WHERE s.processor_id = p_processor_id AND s.partition = p_partition
                  AND (p_token = ANY (s.counted_tokens) OR s.crashed_token = p_token))
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE held_messages h SET crash_count = greatest(h.crash_count - 1, 0)
    FROM processor_crashes s, unnest(s.crashed_transaction_ids, s.crashed_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.crashed_token = p_token
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position;
    UPDATE processor_crashes s
    SET crashed_token = nullif(s.crashed_token, p_token),
        crashed_transaction_ids = CASE WHEN s.crashed_token = p_token THEN '{}' ELSE s.crashed_transaction_ids END,
        crashed_positions = CASE WHEN s.crashed_token = p_token THEN '{}' ELSE s.crashed_positions END,
        crash_count = greatest(s.crash_count - 1, 0), counted_tokens = array_remove(s.counted_tokens, p_token),
        crash_count_alone = greatest(s.crash_count_alone - (p_token = ANY (s.counted_alone_tokens))::int, 0),
        counted_alone_tokens = array_remove(s.counted_alone_tokens, p_token)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND (p_token = ANY (s.counted_tokens) OR s.crashed_token = p_token);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".refuses_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_token uuid
) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is another process alive, is the claim another's, is a repair not finished, or does a conflict wait for a user?
SELECT NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    OR EXISTS (SELECT 1 FROM database_identity i WHERE i.repair_begun_at IS NOT NULL)
    OR EXISTS (SELECT 1 FROM processor_leases l WHERE l.processor_id = p_processor_id AND l.partition = p_partition
               AND l.token <> p_token AND l.expires_at > clock_timestamp())
    OR EXISTS (SELECT 1 FROM processor_conflicts f WHERE f.processor_id = p_processor_id AND f.partition = p_partition
               AND f.needs_person AND f.resolved_at IS NULL)
$function$;

CREATE OR REPLACE FUNCTION :"schema".acquire_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (acquired boolean, epoch bigint, pod text, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A fresh epoch for the process that holds `p_token`. Refused: as refuses_lease says, or the former owner is committing at this
-- moment. Answers who holds the lease after the call; no epoch, where the processor has no such partition (any more): the
-- caller's partitioning is old.
-- A former owner that never gave its lease back is counted as crashed: a message may be what it died of. A process that
-- calls again lives, and its crash is not counted any more.
#variable_conflict use_column
DECLARE
    v_lease processor_leases;
    v_refused boolean;
BEGIN
    v_refused := refuses_lease(p_processor_id, p_partition, p_claim_uid, p_token);
    IF NOT v_refused THEN
        BEGIN
            -- Against a claim that changes hands meanwhile; same order of locks as claim_processor.
            PERFORM 1 FROM processor_claims c
            WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
            -- Against a change of their number, which begins by locking this row. Nothing to lock: it is not partitioned.
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
            -- The locks were waited for: meanwhile the lease was taken, the claim given away, or a conflict recorded.
            v_refused := refuses_lease(p_processor_id, p_partition, p_claim_uid, p_token);
            IF NOT v_refused THEN
                PERFORM uncount_crash(p_processor_id, p_partition, p_token);
                UPDATE processor_leases l
                SET epoch = l.epoch + 1, token = p_token, pod = p_pod, claim_uid = p_claim_uid,
                    acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
                    expires_at = clock_timestamp() + p_lease
                WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
                IF v_lease.token IS DISTINCT FROM p_token AND v_lease.epoch > 0 THEN
                    PERFORM count_crash(p_processor_id, p_partition, v_lease.token);
                END IF;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            v_refused := true;
        END;
    END IF;
    IF v_refused THEN
        PERFORM uncount_crash(p_processor_id, p_partition, p_token);
    END IF;
    RETURN QUERY
        SELECT NOT v_refused, l.epoch, l.pod, l.expires_at FROM (VALUES (1)) AS always
        LEFT JOIN processor_leases l ON l.processor_id = p_processor_id AND l.partition = p_partition;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".renew_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid, p_lease interval
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat. False: the lease lapsed or is another's; it does not come back, acquire a new one.
BEGIN
    UPDATE processor_leases l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition
      AND l.epoch = p_epoch AND l.token = p_token AND l.expires_at > clock_timestamp();
    RETURN FOUND;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".release_lease(
    p_processor_id text, p_partition int, p_epoch bigint, p_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Give the lease back now, so that a standby need not wait for it to lapse.
BEGIN
    UPDATE processor_leases l
    SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.partition = p_partition AND l.epoch = p_epoch AND l.token = p_token;
    RETURN FOUND;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_process_status(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_statuses jsonb, p_lease interval,
    p_ended boolean DEFAULT false
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What a process says of itself, for a user who asks the database: with its heartbeat, and when it ends. Only what a process
-- of the claim's resource says is stored. It replaces what ended or silent processes said. Null: nothing to say.
BEGIN
    IF p_statuses IS NULL OR p_statuses = '[]' THEN
        RETURN false;
    END IF;
    INSERT INTO process_statuses AS w (processor_id, token, pod, statuses, expires_at, ended)
    SELECT p_processor_id, p_token, p_pod, p_statuses, clock_timestamp() + p_lease, p_ended
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE
    SET pod = p_pod, statuses = p_statuses, stored_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease,
        ended = p_ended;
    IF NOT FOUND OR p_ended THEN
        RETURN FOUND;
    END IF;
    DELETE FROM process_statuses w
    USING (SELECT g.token FROM process_statuses g
           WHERE g.processor_id = p_processor_id AND g.token <> p_token
             AND (g.ended OR g.expires_at < clock_timestamp())
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE w.processor_id = p_processor_id AND w.token = gone.token;
    RETURN true;
END
$function$;
