-- A swap lets nothing go that was replaced before; two processes that begin at once agree on the source; a partition that is
-- not there cannot be moved.

CREATE OR REPLACE FUNCTION :"schema".bind_processor_source(
    p_processor_id text, p_claim_uid text, p_source text, p_described text
) RETURNS TABLE (bound boolean, source text, described text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which database does the processor read? Its pairs mean nothing in another one. The claim's holder writes it down when
-- it first asks, or after it was forgotten; everybody else learns what is there. p_source null: this very database,
-- which needs no row. Bound: what is there is what was asked for.
#variable_conflict use_column
BEGIN
    SELECT s.source, s.described INTO source, described FROM processor_sources s WHERE s.processor_id = p_processor_id;
    IF FOUND AND source IS NOT NULL OR p_source IS NULL THEN
        bound := CASE WHEN FOUND THEN coalesce(source = p_source, false) ELSE true END;
    ELSIF FOUND THEN
        UPDATE processor_sources s SET source = p_source, described = p_described, bound_at = clock_timestamp()
        WHERE s.processor_id = p_processor_id AND s.source IS NULL
          AND EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid);
        bound := FOUND;
    ELSE
        INSERT INTO processor_sources AS s (processor_id, source, described)
        SELECT p_processor_id, p_source, p_described FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
          AND NOT EXISTS (SELECT 1 FROM processor_checkpoints k WHERE k.processor_id = p_processor_id)
        ON CONFLICT DO NOTHING;
        bound := FOUND;
    END IF;
    IF NOT bound THEN
        -- Another process of the resource may have written it down at this moment.
        SELECT s.source, s.described INTO source, described FROM processor_sources s
        WHERE s.processor_id = p_processor_id;
        bound := coalesce(source = p_source, false);
    END IF;
    RETURN NEXT;
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
    IF EXISTS (SELECT 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id
               AND p_partition NOT BETWEEN 0 AND d.partition_count - 1) THEN
        -- Its row would be in the way of a change to more partitions.
        RAISE EXCEPTION 'processor % has no partition %', p_processor_id, p_partition
            USING ERRCODE = 'invalid_parameter_value';
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
    IF EXISTS (SELECT 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id
               AND p_partition NOT BETWEEN 0 AND d.partition_count - 1) THEN
        -- Its row would be in the way of a change to more partitions.
        RAISE EXCEPTION 'processor % has no partition %', p_processor_id, p_partition
            USING ERRCODE = 'invalid_parameter_value';
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

CREATE OR REPLACE FUNCTION :"schema".supersede_processor(
    p_processor_id text, p_by text, p_partition int, p_epoch bigint, p_owner_token uuid,
    p_standing text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The last statement of a swap: from its commit on `p_processor_id` can never store again, and `p_by` goes on in its
-- place. p_standing: where the former stood when the caller looked (standing_of).
-- 1 done; 0 was done before, by the same; 2 the former stored something since; 3 it has no checkpoint, hands out batches,
-- or reads another source; 4 the caller is not the live owner of `p_by`, or a checkpoint of `p_by` has not examined what
-- the former has; 5 another one replaced it, or `p_by` replaced another one.
DECLARE
    v_by text;
    v_claim processor_claims;
    v_new processor_checkpoints;
    v_transaction_id xid8;
    v_position bigint;
BEGIN
    SELECT r.processor_id INTO v_by FROM processor_rebuilds r
    WHERE r.of_processor_id = p_processor_id AND r.swapped_at IS NOT NULL;
    IF FOUND THEN
        RETURN CASE WHEN v_by = p_by THEN 0 ELSE 5 END;
    END IF;
    IF p_processor_id = p_by OR NOT holds_lease(p_by, p_partition, p_epoch, p_owner_token) THEN
        RETURN 4;
    END IF;
    SELECT c.* INTO v_claim FROM processor_claims c WHERE c.processor_id = p_by FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN 4;
    END IF;
    -- The tombstone: a claim that nobody gives up, so that a stranger's call is answered 4 for ever. Same order of locks
    -- as claim_processor: the claim, then the leases. No lease can be made before this is committed.
    PERFORM pg_advisory_xact_lock(claim_key(p_processor_id));
    INSERT INTO processor_claims AS c (processor_id, cluster, namespace, name, uid)
    VALUES (p_processor_id, v_claim.cluster, v_claim.namespace, v_claim.name, v_claim.uid)
    ON CONFLICT (processor_id) DO UPDATE
    SET cluster = excluded.cluster, namespace = excluded.namespace, name = excluded.name, uid = excluded.uid,
        claimed_at = clock_timestamp(), vacated_at = NULL;
    PERFORM end_leases(p_processor_id, v_claim.uid);
    PERFORM 1 FROM processor_checkpoints c WHERE c.processor_id = p_processor_id ORDER BY c.partition FOR UPDATE;
    SELECT c.last_processed_transaction_id, c.last_processed_position INTO v_transaction_id, v_position
    FROM processor_checkpoints c WHERE c.processor_id = p_processor_id
    ORDER BY 1 DESC, 2 DESC LIMIT 1;
    IF NOT FOUND OR EXISTS (SELECT 1 FROM competing_processors p WHERE p.processor_id = p_processor_id)
       OR (SELECT s.source FROM processor_sources s WHERE s.processor_id = p_processor_id)
       IS DISTINCT FROM (SELECT s.source FROM processor_sources s WHERE s.processor_id = p_by) THEN
        RETURN 3;
    ELSIF standing_of(p_processor_id) IS DISTINCT FROM p_standing THEN
        RETURN 2;
    END IF;
    SELECT c.* INTO v_new FROM processor_checkpoints c WHERE c.processor_id = p_by AND c.partition = p_partition;
    IF NOT FOUND OR EXISTS (SELECT 1 FROM processor_checkpoints n CROSS JOIN processor_checkpoints o
                            WHERE n.processor_id = p_by AND o.processor_id = p_processor_id
                              AND NOT has_examined(n, o)) THEN
        RETURN 4;
    END IF;
    INSERT INTO processor_rebuilds AS r (processor_id, of_processor_id, swapped_at, transaction_id, "position")
    VALUES (p_by, p_processor_id, clock_timestamp(), v_transaction_id, v_position)
    ON CONFLICT (processor_id) DO UPDATE
    SET of_processor_id = excluded.of_processor_id, swapped_at = excluded.swapped_at,
        transaction_id = excluded.transaction_id, "position" = excluded."position"
    WHERE r.swapped_at IS NULL;
    IF NOT FOUND THEN
        RETURN 5;  -- what it replaced before would be let go
    END IF;
    INSERT INTO recorded_acts (act, processor_id, from_transaction_id, from_position, to_transaction_id, to_position,
                               reason, decided_by)
    VALUES ('Swap', p_processor_id, v_transaction_id, v_position, v_new.last_processed_transaction_id,
            v_new.last_processed_position, format('superseded by %s', p_by), p_decided_by);
    RETURN 1;
END
$function$;
