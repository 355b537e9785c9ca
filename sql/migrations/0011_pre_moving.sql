-- Moving a processor: which database it reads, starting where another one stands, and replacing one by another.

CREATE TABLE :"schema".processor_sources (
    processor_id text        NOT NULL,
    source       text,
    described    text        NOT NULL,
    bound_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT processor_sources_pkey PRIMARY KEY (processor_id)
);

COMMENT ON TABLE :"schema".processor_sources IS
    'Processors whose messages are in another database, and which one that is; source is null once forgotten. Without a row: in this one.';

CREATE TABLE :"schema".processor_rebuilds (
    processor_id    text        NOT NULL,
    of_processor_id text        NOT NULL,
    begun_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    swapped_at      timestamptz,
    transaction_id  xid8,
    position        bigint,
    CONSTRAINT processor_rebuilds_pkey PRIMARY KEY (processor_id),
    CONSTRAINT processor_rebuilds_swap_is_whole
        CHECK ((swapped_at IS NULL) = (transaction_id IS NULL) AND (swapped_at IS NULL) = (position IS NULL))
);

-- A processor is replaced once.
CREATE UNIQUE INDEX processor_rebuilds_swapped ON :"schema".processor_rebuilds (of_processor_id)
    WHERE swapped_at IS NOT NULL;

COMMENT ON TABLE :"schema".processor_rebuilds IS
    'Which processor replaces which; swapped_at: it has, and the pair at which the other one stood. Changed by supersede_processor only.';

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
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".forget_processor_source(p_processor_id text, p_reason text, p_decided_by text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The source moved, or is a copy that a person takes for the original: whoever claims next writes down what it reads.
-- 1 done; 0 nothing was written down; 4 refused: an owner is live.
DECLARE
    v_described text;
BEGIN
    PERFORM 1 FROM processor_leases l WHERE l.processor_id = p_processor_id ORDER BY l.partition FOR UPDATE;
    IF EXISTS (SELECT 1 FROM processor_leases l
               WHERE l.processor_id = p_processor_id AND l.expires_at > clock_timestamp()) THEN
        RETURN 4;
    END IF;
    UPDATE processor_sources s SET source = NULL WHERE s.processor_id = p_processor_id AND s.source IS NOT NULL
    RETURNING s.described INTO v_described;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    INSERT INTO recorded_acts (act, processor_id, reason, decided_by)
    VALUES ('ForgetSource', p_processor_id, format('%s (it read %s)', p_reason, v_described), p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".spread_start(
    p_processor_id text, p_partitions int[], p_transaction_ids xid8[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Each partition starts at a pair of its own: only in the transaction that divided the processor (begin_partitions), and
-- never before the pair that all of them were given there.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) OR NOT EXISTS (
        SELECT 1 FROM processor_partitions d
        WHERE d.processor_id = p_processor_id AND d.xmin = pg_current_xact_id()::xid) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n."position"
    FROM unnest(p_partitions, p_transaction_ids, p_positions) AS n (partition, transaction_id, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition
      AND (n.transaction_id, n."position") > (c.last_processed_transaction_id, c.last_processed_position);
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".spread_windows(
    p_processor_id text, p_partitions int[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[],
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- As spread_start, for the cursor Snapshot: after begin_windows, in the transaction that divided the processor.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) OR NOT EXISTS (
        SELECT 1 FROM processor_partitions d
        WHERE d.processor_id = p_processor_id AND d.xmin = pg_current_xact_id()::xid) THEN
        RETURN false;
    END IF;
    UPDATE processor_checkpoints c
    SET lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, window_position = n."position"
    FROM unnest(p_partitions, p_lowers, p_uppers, p_positions) AS n (partition, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition AND c.cursor_kind = 'Snapshot';
    PERFORM keep_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".note_rebuild(
    p_processor_id text, p_of text, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (of_processor_id text, swapped_at timestamptz, superseded_by text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The live owner writes down which processor it is to replace, for people to see; a swap that was made is never taken
-- back. Answers what is so, and who replaced that processor, if anybody did.
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

CREATE OR REPLACE FUNCTION :"schema".standing_of(p_processor_id text, p_but_partition int DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Where a processor stands, in words that differ if anything of it does: to see that nobody stored anything meanwhile.
SELECT string_agg(concat_ws(' ', c.partition, c.last_processed_transaction_id, c.last_processed_position,
                            coalesce(c.lower_snapshot::text, '-'), coalesce(c.upper_snapshot::text, '-'),
                            coalesce(c.window_position::text, '-')), ', ' ORDER BY c.partition)
FROM processor_checkpoints c
WHERE c.processor_id = p_processor_id AND c.partition IS DISTINCT FROM p_but_partition
$function$;

CREATE OR REPLACE FUNCTION :"schema".covers_snapshot(p_snapshot pg_snapshot, p_other pg_snapshot) RETURNS boolean
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Does a snapshot see whatever the other one sees? Null sees nothing. As outbox_core.standing.covers.
SELECT p_other IS NULL OR p_snapshot IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM pg_snapshot_xip(p_snapshot) AS i (id) WHERE pg_visible_in_snapshot(i.id, p_other))
    AND greatest(pg_snapshot_xmax(p_other)::text::numeric - pg_snapshot_xmax(p_snapshot)::text::numeric, 0)
        = (SELECT count(*) FROM pg_snapshot_xip(p_other) AS i (id) WHERE i.id >= pg_snapshot_xmax(p_snapshot))
$function$;

CREATE OR REPLACE FUNCTION :"schema".has_examined(p_one :"schema".processor_checkpoints, p_other :"schema".processor_checkpoints)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Has one checkpoint examined whatever the other one has? A pair (x, p) is the window from x:x: to x+1:x+1: at p. A pair
-- can only be said to cover a window as a whole.
DECLARE
    v_x numeric := p_other.last_processed_transaction_id::text::numeric;
    v_lower pg_snapshot := p_other.lower_snapshot;
    v_upper pg_snapshot := p_other.upper_snapshot;
    v_position bigint := p_other.window_position;
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
        OR coalesce(p_one.window_position >= v_position, false)
           AND covers_snapshot(p_one.lower_snapshot, v_lower) AND covers_snapshot(p_one.upper_snapshot, v_upper);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".advance_lanes(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_standing text, p_partitions int[],
    p_transaction_ids xid8[], p_counters bigint[], p_lowers pg_snapshot[], p_uppers pg_snapshot[], p_positions bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The owner of one partition has handled, in this transaction, what others had before them (a swap): their checkpoints go
-- there, and their leases end, so that whoever owned them reads anew. p_standing: where the others stood when that was
-- begun (standing_of without the caller's own). False: one of them stored something since, or the caller is no owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) OR p_partition = ANY (p_partitions) THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM processor_leases l
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions) ORDER BY l.partition FOR UPDATE;
    PERFORM 1 FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition <> p_partition ORDER BY c.partition FOR UPDATE;
    IF standing_of(p_processor_id, p_partition) IS DISTINCT FROM p_standing THEN
        RETURN false;
    END IF;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.partition = ANY (p_partitions);
    UPDATE processor_checkpoints c
    SET last_processed_transaction_id = n.transaction_id, last_processed_position = n.counter,
        lower_snapshot = n.lower_snapshot, upper_snapshot = n.upper_snapshot, window_position = n."position",
        stored_at = clock_timestamp()
    FROM unnest(p_partitions, p_transaction_ids, p_counters, p_lowers, p_uppers, p_positions)
        AS n (partition, transaction_id, counter, lower_snapshot, upper_snapshot, "position")
    WHERE c.processor_id = p_processor_id AND c.partition = n.partition;
    PERFORM keep_checkpoint(p_processor_id, n.partition) FROM unnest(p_partitions) AS n (partition);
    RETURN true;
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
-- the former has; 5 another one replaced it.
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
        transaction_id = excluded.transaction_id, "position" = excluded."position";
    INSERT INTO recorded_acts (act, processor_id, from_transaction_id, from_position, to_transaction_id, to_position,
                               reason, decided_by)
    VALUES ('Swap', p_processor_id, v_transaction_id, v_position, v_new.last_processed_transaction_id,
            v_new.last_processed_position, format('superseded by %s', p_by), p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".guard_superseded() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor that was replaced stays so: no lease on it, and its claim stays with the one that replaced it, also where
-- somebody takes claims by force. Costs nothing on a heartbeat or a store: it fires where a lease or claim changes hands.
DECLARE
    v_by text;
BEGIN
    SELECT r.processor_id INTO v_by FROM processor_rebuilds r
    WHERE r.of_processor_id = OLD.processor_id AND r.swapped_at IS NOT NULL;
    IF NOT FOUND THEN
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    ELSIF TG_OP = 'DELETE' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'processor % was replaced by %', OLD.processor_id, v_by
        USING ERRCODE = 'OB001', HINT = 'It can never run again: delete its resource, or use another processorId.';
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_behind_its_rows() RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a message or a checkpoint stored here whose transaction id is above that of the transaction that wrote the row? Then it came from a
-- server that was further on, and what is written here since sorts before it. True for good, also once this server's
-- counter has passed it; until `outbox repair`. Checkpoints of another database's messages say nothing. Scans the outbox once.
DECLARE
    v_now bigint := pg_current_xact_id()::text::bigint;  -- assigned first: age() counts from it
    v_value text;
    v_found boolean;
BEGIN
    -- A snapshot's beginning is at most the transaction that takes it; its end may be beyond.
    FOR v_value IN
        SELECT CASE a.atttypid WHEN 'xid8'::regtype THEN format('c.%I', a.attname)
                               ELSE format('pg_snapshot_xmin(c.%I)', a.attname) END
        FROM pg_attribute a
        WHERE a.attrelid = 'processor_checkpoints'::regclass AND a.attnum > 0 AND NOT a.attisdropped
          AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype)
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE (%s)::text::numeric > $1 - age(c.xmin) '
                       'AND NOT EXISTS (SELECT 1 FROM processor_sources s WHERE s.processor_id = c.processor_id))', v_value)
        INTO v_found USING v_now;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN EXISTS (SELECT 1 FROM messages o WHERE o.transaction_id::text::numeric > v_now - age(o.xmin));
END
$function$;

CREATE TRIGGER guard_superseded BEFORE UPDATE ON :"schema".processor_leases
    FOR EACH ROW WHEN (NEW.token IS NOT NULL AND NEW.token IS DISTINCT FROM OLD.token)
    EXECUTE FUNCTION :"schema".guard_superseded();
CREATE TRIGGER guard_superseded BEFORE UPDATE ON :"schema".processor_claims
    FOR EACH ROW WHEN (NEW.uid IS DISTINCT FROM OLD.uid)
    EXECUTE FUNCTION :"schema".guard_superseded();
CREATE TRIGGER guard_superseded_deleted BEFORE DELETE ON :"schema".processor_claims
    FOR EACH ROW EXECUTE FUNCTION :"schema".guard_superseded();

-- By name: other migrations grant some of their own to everybody.
REVOKE EXECUTE ON FUNCTION :"schema".bind_processor_source(text, text, text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".forget_processor_source(text, text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".spread_start(text, int[], xid8[], bigint[], int, bigint, uuid) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".note_rebuild(text, text, bigint, uuid) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".supersede_processor(text, text, int, bigint, uuid, text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".spread_windows(text, int[], pg_snapshot[], pg_snapshot[], bigint[], int, bigint, uuid) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".standing_of(text, int) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".covers_snapshot(pg_snapshot, pg_snapshot) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".has_examined(:"schema".processor_checkpoints, :"schema".processor_checkpoints) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".advance_lanes(text, int, bigint, uuid, text, int[], xid8[], bigint[], pg_snapshot[], pg_snapshot[],
                                                   bigint[]) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".guard_superseded() FROM PUBLIC;
