-- Rebuilds: one processor catches up with another and replaces it.

CREATE OR REPLACE FUNCTION :"schema".note_rebuild(
    p_processor_id text, p_of text, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (of_processor_id text, swapped_at timestamptz, superseded_by text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The live owner writes down which processor it is to replace, for users to see; a swap that was made is never taken back.
-- Answers what is written, and which processor replaced that one; null: none did.
#variable_conflict use_column
BEGIN
    SELECT r.of_processor_id, r.swapped_at INTO of_processor_id, swapped_at
    FROM processor_rebuilds r WHERE r.processor_id = p_processor_id;
    IF (NOT FOUND OR (swapped_at IS NULL AND of_processor_id <> p_of))
       AND holds_lease(p_processor_id, 0, p_epoch, p_owner_token) THEN
        INSERT INTO processor_rebuilds AS r (processor_id, of_processor_id) VALUES (p_processor_id, p_of)
        ON CONFLICT (processor_id) DO UPDATE SET of_processor_id = excluded.of_processor_id
        WHERE r.swapped_at IS NULL;
        of_processor_id := p_of;
    END IF;
    SELECT r.processor_id INTO superseded_by FROM processor_rebuilds r
    WHERE r.of_processor_id = p_of AND r.swapped_at IS NOT NULL;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".covers_snapshot(p_snapshot pg_snapshot, p_other pg_snapshot) RETURNS boolean
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Does a snapshot see everything that the other one sees? Null sees nothing. As outbox_core.progress.coverage.covers.
SELECT p_other IS NULL OR p_snapshot IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM pg_snapshot_xip(p_snapshot) AS i (id) WHERE pg_visible_in_snapshot(i.id, p_other))
    AND greatest(pg_snapshot_xmax(p_other)::text::numeric - pg_snapshot_xmax(p_snapshot)::text::numeric, 0)
        = (SELECT count(*) FROM pg_snapshot_xip(p_other) AS i (id) WHERE i.id >= pg_snapshot_xmax(p_snapshot))
$function$;

CREATE OR REPLACE FUNCTION :"schema".has_examined(p_one :"schema".processor_checkpoints, p_other :"schema".processor_checkpoints)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Has one checkpoint examined everything that the other one has? A pair (x, p) is the snapshot range from x:x: to x+1:x+1:
-- at p. Of a pair we can only say that it covers a snapshot range as a whole.
DECLARE
    v_x numeric := p_other.last_processed_transaction_id::text::numeric;
    v_lower pg_snapshot := p_other.lower_snapshot;
    v_upper pg_snapshot := p_other.upper_snapshot;
    v_position bigint := p_other.range_position;
BEGIN
    IF p_one.cursor_kind <> 'Snapshot' AND p_other.cursor_kind <> 'Snapshot' THEN
        RETURN (p_one.last_processed_transaction_id, p_one.last_processed_position)
            >= (p_other.last_processed_transaction_id, p_other.last_processed_position);
    ELSIF p_one.cursor_kind <> 'Snapshot' THEN
        RETURN coalesce(
            (p_one.last_processed_transaction_id::text::numeric, p_one.last_processed_position)
            >= (pg_snapshot_xmax(coalesce(v_upper, v_lower))::text::numeric - 1, 9223372036854775807), true);
    ELSIF p_other.cursor_kind <> 'Snapshot' AND v_x > 0 THEN
        v_lower := format('%s:%s:', v_x, v_x)::pg_snapshot;
        v_upper := format('%s:%s:', v_x + 1, v_x + 1)::pg_snapshot;
        v_position := p_other.last_processed_position;
    END IF;
    RETURN covers_snapshot(p_one.lower_snapshot, coalesce(v_upper, v_lower))
        OR coalesce(p_one.range_position >= v_position, false)
           AND covers_snapshot(p_one.lower_snapshot, v_lower) AND covers_snapshot(p_one.upper_snapshot, v_upper);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".coverage_of(p_processor_id text, p_but_partition int DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The coverage of a processor as a text that differs if any of its checkpoints does: so a caller sees that none was stored
-- meanwhile.
SELECT string_agg(concat_ws(' ', c.partition, c.last_processed_transaction_id, c.last_processed_position,
                            coalesce(c.lower_snapshot::text, '-'), coalesce(c.upper_snapshot::text, '-'),
                            coalesce(c.range_position::text, '-')), ', ' ORDER BY c.partition)
FROM processor_checkpoints c
WHERE c.processor_id = p_processor_id AND c.partition IS DISTINCT FROM p_but_partition
$function$;

CREATE OR REPLACE FUNCTION :"schema".advance_partitions(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_coverage text, p_partitions int[],
    p_transaction_ids xid8[], p_counters bigint[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The owner of one partition has handled, in this transaction, the catch-up plans of other partitions (a swap): their
-- checkpoints go there, and their leases end, so that their owners read anew. p_coverage: the others' coverage when that
-- was begun (coverage_of without the caller's own). False: one of them stored something since, or the caller is no owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) OR p_partition = ANY (p_partitions) THEN
        RETURN false;
    END IF;
    -- Of a partition that was never owned too: its first owner may be acquiring it at this moment.
    INSERT INTO processor_leases (processor_id, partition)
    SELECT p_processor_id, n FROM unnest(p_partitions) AS n ORDER BY n ON CONFLICT DO NOTHING;
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions) ORDER BY l.partition FOR UPDATE;
    PERFORM 1 FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition <> p_partition ORDER BY c.partition FOR UPDATE;
    IF coverage_of(p_processor_id, p_partition) IS DISTINCT FROM p_coverage THEN
        RETURN false;
    END IF;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions);
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n.counter,
        lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, range_position = n."position",
        stored_at = clock_timestamp()
    FROM unnest(p_partitions, p_transaction_ids, p_counters, p_lowers, p_uppers, p_positions)
        AS n (partition, transaction_id, counter, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition;
    PERFORM store_shadow_checkpoint(p_processor_id, n.partition) FROM unnest(p_partitions) AS n (partition);
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".supersede_processor(
    p_processor_id text, p_by text, p_partition int, p_epoch bigint, p_owner_token uuid,
    p_coverage text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The last statement of a swap: from its commit on `p_processor_id` can never store again, and `p_by` goes on in its
-- place. p_coverage: the coverage of the former when the caller looked (coverage_of).
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
    -- A claim that no resource gives up: so the call of an unowned caller is always answered 4. Same locks as claim_processor,
    -- in the same order: the claim, then the leases. A lease that is being acquired is waited for, and ended; no other one can be
    -- made before this is committed. ON CONFLICT alone would lock the claim too weakly for that.
    PERFORM pg_advisory_xact_lock(claim_key(p_processor_id));
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id FOR UPDATE;
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
    ELSIF coverage_of(p_processor_id) IS DISTINCT FROM p_coverage THEN
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
    INSERT INTO audit_log (action, processor_id, from_transaction_id, from_position, to_transaction_id, to_position,
                               reason, decided_by)
    VALUES ('Swap', p_processor_id, v_transaction_id, v_position, v_new.last_processed_transaction_id,
            v_new.last_processed_position, format('superseded by %s', p_by), p_decided_by);
    RETURN 1;
END
$function$;
