-- What somebody's old snapshot keeps of checkpoints and claims is bounded, and makes no store slower.

CREATE OR REPLACE FUNCTION :"schema".rewrite_checkpoints(p_bytes bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '50ms'
AS $function$
-- Bounds what checkpoints take while somebody's old snapshot keeps VACUUM from their dead versions: once table and indexes are
-- larger than `p_bytes`, and than 4 kB for each checkpoint, the living rows are written anew into the emptied table. False: not
-- needed, or not now. Who holds a lock on the table (a batch about to commit, whoever read it in an open transaction) is not
-- waited for; the caller comes again. A statement that takes its snapshot before it locks the table would find it empty: so
-- would a SQL function that is STABLE, and therefore find_edit is not.
DECLARE
    v_rows processor_checkpoints[];
BEGIN
    IF pg_total_relation_size('processor_checkpoints')
           <= greatest(p_bytes, 4096 * (SELECT count(*) FROM kept_checkpoints))
       -- A snapshot from before the lock would bring back a checkpoint that another has replaced since.
       OR current_setting('transaction_isolation') <> 'read committed'
       -- Somebody's trigger would take these for new checkpoints.
       OR EXISTS (SELECT 1 FROM pg_trigger g WHERE g.tgrelid = 'processor_checkpoints'::regclass)
       OR NOT pg_try_advisory_xact_lock(hashtext('outbox rewrite ' || current_schema())) THEN
        RETURN false;
    END IF;
    LOCK TABLE processor_checkpoints IN ACCESS EXCLUSIVE MODE;
    v_rows := ARRAY(SELECT c FROM processor_checkpoints c);
    TRUNCATE processor_checkpoints;
    INSERT INTO processor_checkpoints SELECT c.* FROM unnest(v_rows) AS c;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".find_edit(p_processor_id text, p_partition int)
RETURNS TABLE (kept_transaction_id xid8, kept_position bigint, transaction_id xid8, "position" bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- One row if somebody changed or deleted the checkpoint past our functions: the pair that they had stored (null: the whole row
-- was written by hand) and the one that is there (null: none). Against mistakes, not against forgery: the copy is in the row,
-- and whoever may write that can write the copy too. A first row that was inserted by hand is nobody's edit.
-- VOLATILE for its snapshot's sake: see rewrite_checkpoints.
SELECT c.kept_transaction_id, c.kept_position, c.last_processed_transaction_id, c.last_processed_position
FROM kept_checkpoints k
LEFT JOIN processor_checkpoints c ON c.processor_id = k.processor_id AND c.partition = k.partition
WHERE k.processor_id = p_processor_id AND k.partition = p_partition
  AND (c.kept_position IS NULL
       OR (c.kept_transaction_id, c.kept_position) <> (c.last_processed_transaction_id, c.last_processed_position)
       OR c.kept_window IS DISTINCT FROM CASE c.cursor_kind
          WHEN 'Snapshot' THEN window_seal(c.lower_snapshot, c.upper_snapshot, c.window_position) END)
$function$;

CREATE OR REPLACE FUNCTION :"schema".claim_key(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What callers without an epoch lock in common, and whoever makes a claim alone.
SELECT hashtextextended(format('outbox claim %I %s', current_schema(), p_processor_id), 0)
$function$;

CREATE OR REPLACE FUNCTION :"schema".refuses_stranger(p_processor_id text, p_partition int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a caller without epoch not store? True while a claim exists or an owner lives. Refused callers are counted in a
-- sequence, which their rollback does not undo. After a false answer no claim can be made until the caller's transaction ends.
DECLARE
    v_held boolean;
    v_sequence regclass := to_regclass(quote_ident('strangers_' || md5(p_processor_id)));
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        v_held := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id);
        IF NOT v_held THEN
            -- The statement after it sees whatever was claimed before the lock was given. No row is left behind.
            PERFORM pg_advisory_xact_lock_shared(claim_key(p_processor_id));
            v_held := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id);
        END IF;
    ELSE
        -- Takes the key that a claim needs; with a claim that an old snapshot cannot see it fails with 40001.
        INSERT INTO processor_claims (processor_id, cluster, namespace, name, uid)
        VALUES (p_processor_id, '', '', '', '') ON CONFLICT DO NOTHING;
        v_held := NOT FOUND;
        IF NOT v_held THEN
            DELETE FROM processor_claims c WHERE c.processor_id = p_processor_id;
        END IF;
    END IF;
    IF NOT v_held THEN
        SELECT l.expires_at > clock_timestamp() INTO v_held FROM processor_leases l
        WHERE l.processor_id = p_processor_id AND l.partition = p_partition
        FOR KEY SHARE;
    END IF;
    IF v_held AND v_sequence IS NOT NULL THEN
        PERFORM nextval(v_sequence);
    END IF;
    RETURN coalesce(v_held, false);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".claim_processor(
    p_processor_id text, p_cluster text, p_namespace text, p_name text, p_uid text,
    p_force boolean DEFAULT false, p_sweep_uids text[] DEFAULT '{}'
) RETURNS TABLE (
    granted boolean, cluster text, namespace text, name text, uid text, claimed_at timestamptz, vacated_at timestamptz
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Ask for the processor, or say again that it is ours (that undoes a vacate). Answers the holder after the call. Not
-- granted, though it was open to us: somebody is committing at this moment; ask again.
#variable_conflict use_column
DECLARE
    v_claim processor_claims;
    v_granted boolean;
BEGIN
    SELECT c.* INTO v_claim FROM processor_claims c WHERE c.processor_id = p_processor_id;
    v_granted := coalesce(v_claim.uid = p_uid AND v_claim.vacated_at IS NULL, false);
    IF NOT v_granted AND (v_claim.processor_id IS NULL OR p_force
        OR claim_is_open_to(v_claim, p_cluster, p_namespace, p_name, p_uid, p_sweep_uids)) THEN
        BEGIN
            PERFORM pg_advisory_xact_lock(claim_key(p_processor_id));  -- also where the claim seen is released meanwhile
            INSERT INTO processor_claims (processor_id, cluster, namespace, name, uid)
            VALUES (p_processor_id, p_cluster, p_namespace, p_name, p_uid) ON CONFLICT DO NOTHING;
            v_granted := FOUND;
            SELECT c.* INTO v_claim FROM processor_claims c WHERE c.processor_id = p_processor_id FOR UPDATE;
            IF NOT v_granted AND v_claim.processor_id IS NOT NULL AND (p_force
                OR claim_is_open_to(v_claim, p_cluster, p_namespace, p_name, p_uid, p_sweep_uids)) THEN
                IF p_force AND NOT claim_is_open_to(v_claim, p_cluster, p_namespace, p_name, p_uid, p_sweep_uids) THEN
                    INSERT INTO recorded_acts (act, processor_id, reason, decided_by)
                    VALUES ('TakeOver', p_processor_id,
                            format('claim of %s/%s/%s taken by force', v_claim.cluster, v_claim.namespace, v_claim.name),
                            format('%s/%s/%s', p_cluster, p_namespace, p_name));
                END IF;
                UPDATE processor_claims c
                SET cluster = p_cluster, namespace = p_namespace, name = p_name, uid = p_uid, vacated_at = NULL,
                    claimed_at = CASE WHEN c.uid = p_uid THEN c.claimed_at ELSE clock_timestamp() END
                WHERE c.processor_id = p_processor_id;
                v_granted := true;
            END IF;
            IF v_granted THEN
                PERFORM end_leases(p_processor_id, p_uid);
                IF to_regclass(quote_ident('strangers_' || md5(p_processor_id))) IS NULL THEN
                    EXECUTE format('CREATE SEQUENCE IF NOT EXISTS %I', 'strangers_' || md5(p_processor_id));
                END IF;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            v_granted := false;
        END;
    END IF;
    RETURN QUERY
        SELECT v_granted, c.cluster, c.namespace, c.name, c.uid, c.claimed_at, c.vacated_at
        FROM processor_claims c WHERE c.processor_id = p_processor_id
        UNION ALL
        SELECT false, NULL, NULL, NULL, NULL, NULL, NULL
        WHERE NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id);
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
        transaction_id = excluded.transaction_id, "position" = excluded."position";
    INSERT INTO recorded_acts (act, processor_id, from_transaction_id, from_position, to_transaction_id, to_position,
                               reason, decided_by)
    VALUES ('Swap', p_processor_id, v_transaction_id, v_position, v_new.last_processed_transaction_id,
            v_new.last_processed_position, format('superseded by %s', p_by), p_decided_by);
    RETURN 1;
END
$function$;

REVOKE EXECUTE ON FUNCTION :"schema".rewrite_checkpoints(bigint) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION :"schema".claim_key(text) FROM PUBLIC;
