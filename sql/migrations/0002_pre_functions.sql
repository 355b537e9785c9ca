-- The contract of checkpoints, claims and leases. They run with their owner's rights, so that a processor's role needs EXECUTE
-- only; nobody has that by default, because the schema's producers must not be able to claim a processor.

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
        -- Whoever is not the owner leaves no lock behind.
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

CREATE OR REPLACE FUNCTION :"schema".refuses_stranger(p_processor_id text, p_partition int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a caller without epoch not store? True while a claim exists or an owner lives. Refused callers are counted in a
-- sequence, which their rollback does not undo. After a false answer no claim can be made until the caller's transaction ends.
DECLARE
    v_held boolean := false;
    v_sequence regclass := to_regclass(quote_ident('strangers_' || md5(p_processor_id)));
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        v_held := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id);
    END IF;
    IF NOT v_held THEN
        -- Takes the key that a claim needs; with a claim that an old snapshot cannot see it fails with 40001.
        INSERT INTO processor_claims (processor_id, cluster, namespace, name, uid)
        VALUES (p_processor_id, '', '', '', '') ON CONFLICT DO NOTHING;
        v_held := NOT FOUND;
        IF NOT v_held THEN
            DELETE FROM processor_claims c WHERE c.processor_id = p_processor_id;
            SELECT l.expires_at > clock_timestamp() INTO v_held FROM processor_leases l
            WHERE l.processor_id = p_processor_id AND l.partition = p_partition
            FOR KEY SHARE;
        END IF;
    END IF;
    IF v_held AND v_sequence IS NOT NULL THEN
        PERFORM nextval(v_sequence);
    END IF;
    RETURN coalesce(v_held, false);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_partition int,
    p_new_transaction_id xid8, p_new_position bigint,
    p_expected_transaction_id xid8, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- 1 stored, 0 ignored (already there), 2 further ahead, 3 older, 4 not the owner. Everything but 1: roll back.
-- The steps are those of the contract's table, in its order; the row is locked before it is compared.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    -- step 1
    IF p_processor_id IS NULL OR p_partition IS NULL OR p_new_transaction_id IS NULL OR p_new_position IS NULL
       OR (p_expected_transaction_id IS NULL) <> (p_expected_position IS NULL) THEN
        RAISE EXCEPTION 'half a checkpoint: new %:%, expected %:%', p_new_transaction_id, p_new_position,
            p_expected_transaction_id, p_expected_position
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Name both parts of a pair, transaction_id and position.';
    END IF;
    IF (p_new_transaction_id, p_new_position) <= (p_expected_transaction_id, p_expected_position) THEN
        RAISE EXCEPTION 'a checkpoint never moves back: new %:% is not after expected %:%', p_new_transaction_id,
            p_new_position, p_expected_transaction_id, p_expected_position
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rewind_processor_checkpoint() is the recorded way back.';
    END IF;
    -- step 2
    IF p_epoch IS NULL AND p_owner_token IS NULL THEN
        IF refuses_stranger(p_processor_id, p_partition) THEN
            RETURN 4;
        END IF;
    ELSIF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN 4;
    END IF;
    LOOP
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = p_processor_id AND c.partition = p_partition
        FOR UPDATE;
        EXIT WHEN FOUND;
        IF p_expected_position IS NOT NULL
           AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
            RETURN 3;  -- step 5
        END IF;
        -- Of two callers one inserts; an old snapshot that cannot see the other's row gets 40001 here.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, p_partition, p_new_transaction_id, p_new_position)
        ON CONFLICT DO NOTHING;
        IF FOUND AND p_expected_position IS NOT NULL THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
            RETURN 3;  -- step 5
        ELSIF FOUND THEN
            RETURN 1;  -- step 4
        END IF;
    END LOOP;
    IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
       = (p_new_transaction_id, p_new_position) THEN
        RETURN 0;  -- step 3
    ELSIF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
          = (p_expected_transaction_id, p_expected_position) THEN
        UPDATE processor_checkpoints c
        SET last_processed_transaction_id = p_new_transaction_id,
            last_processed_position = p_new_position,
            stored_at = clock_timestamp()
        WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
        RETURN 1;  -- step 6
    ELSIF p_expected_position IS NULL
          OR (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
             > (p_expected_transaction_id, p_expected_position) THEN
        RETURN 2;  -- step 7
    END IF;
    RETURN 3;  -- step 8
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_position bigint, p_expected_position bigint, p_transaction_id xid8
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The article's form, for scripts written against it: 4 wherever a claim exists, and counted. It cannot name the
-- expected pair: it expects whatever pair is stored with that position. Use the form with eight arguments.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    IF refuses_stranger(p_processor_id, 0) THEN
        RETURN 4;
    END IF;
    IF p_expected_position IS NOT NULL THEN
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = p_processor_id AND c.partition = 0
        FOR UPDATE;
        IF FOUND AND (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
                     IS DISTINCT FROM (p_transaction_id, p_position)
                 AND v_stored.last_processed_position <> p_expected_position THEN
            RETURN CASE WHEN v_stored.last_processed_position > p_expected_position THEN 2 ELSE 3 END;
        ELSIF FOUND AND (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
                        = (p_transaction_id, p_position) THEN
            RETURN 0;
        END IF;
    END IF;
    RETURN store_processor_checkpoint(
        p_processor_id, 0, p_transaction_id, p_position,
        CASE WHEN p_expected_position IS NOT NULL THEN coalesce(v_stored.last_processed_transaction_id, '0'::xid8) END,
        p_expected_position, NULL, NULL);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".settle_processor_checkpoint(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, transaction_id xid8, "position" bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What is stored, for an owner that does not know whether its COMMIT arrived: waits until that transaction is over.
-- 55P03 while it is not: ask again. Call it in a transaction of its own, in READ COMMITTED.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        -- A first row that is not committed yet is invisible, but its key is taken.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, p_partition, '0', 0) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
        ELSE
            SELECT c.* INTO v_stored FROM processor_checkpoints c
            WHERE c.processor_id = p_processor_id AND c.partition = p_partition
            FOR UPDATE;
            transaction_id := v_stored.last_processed_transaction_id;
            "position" := v_stored.last_processed_position;
        END IF;
    END IF;
    RETURN NEXT;
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

CREATE OR REPLACE FUNCTION :"schema".claim_is_open_to(
    p_claim :"schema".processor_claims, p_cluster text, p_namespace text, p_name text, p_uid text, p_sweep_uids text[]
) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Its own holder, the same resource created again, anybody 30 s after it was vacated, and the cluster that knows its
-- own resource to be gone.
SELECT p_claim.uid = p_uid
    OR (p_claim.cluster, p_claim.namespace, p_claim.name) = (p_cluster, p_namespace, p_name)
    OR coalesce(p_claim.vacated_at < clock_timestamp() - interval '30 seconds', false)
    OR (p_claim.cluster = p_cluster AND p_claim.uid = ANY (coalesce(p_sweep_uids, '{}')))
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

CREATE OR REPLACE FUNCTION :"schema".vacate_claim(p_processor_id text, p_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The last sign of a process that was not told why it must stop: others may claim after the grace.
BEGIN
    UPDATE processor_claims c SET vacated_at = clock_timestamp()
    WHERE c.processor_id = p_processor_id AND c.uid = p_uid AND c.vacated_at IS NULL;
    RETURN FOUND;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".release_claim(p_processor_id text, p_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The resource is going: the claim and its leases end now. The checkpoint stays. False: the claim was not this resource's.
BEGIN
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_uid FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM end_leases(p_processor_id, NULL);
    DELETE FROM processor_claims c WHERE c.processor_id = p_processor_id;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".hand_over_claim(
    p_processor_id text, p_uid text, p_to_cluster text, p_to_namespace text, p_to_name text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The holder names its successor, whose uid it need not know: nobody else can claim in between.
BEGIN
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_uid FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM end_leases(p_processor_id, NULL);
    UPDATE processor_claims c
    SET cluster = p_to_cluster, namespace = p_to_namespace, name = p_to_name, uid = '', vacated_at = NULL,
        claimed_at = clock_timestamp()
    WHERE c.processor_id = p_processor_id;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".acquire_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (acquired boolean, epoch bigint, pod text, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A fresh epoch for the process that holds `p_token`. Refused: another process is alive, the claim is another's, a
-- conflict waits for a person, or the former owner is committing at this moment. Answers who holds the lease after the call.
#variable_conflict use_column
DECLARE
    v_lease processor_leases;
    v_refused boolean;
BEGIN
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

CREATE OR REPLACE FUNCTION :"schema".prune_conflicts(p_processor_id text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor keeps its last 1,000 refusals, and besides every one that waits for a person. What goes is counted.
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

CREATE OR REPLACE FUNCTION :"schema".prune_acts() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The last 10,000 acts are kept: people's decisions are few, a script that decides may not be.
BEGIN
    DELETE FROM recorded_acts a
    WHERE a.id <= (SELECT k.id FROM recorded_acts k ORDER BY k.id DESC OFFSET 10000 LIMIT 1);
    RETURN NULL;
END
$function$;

CREATE TRIGGER prune_acts AFTER INSERT ON :"schema".recorded_acts
    FOR EACH STATEMENT EXECUTE FUNCTION :"schema".prune_acts();

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
-- copy (find_edit) whether somebody edited it, and a person may have decided by now.
DECLARE
    v_id bigint;
BEGIN
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

CREATE OR REPLACE FUNCTION :"schema".rewind_processor_checkpoint(
    p_processor_id text, p_partition int, p_transaction_id xid8, p_position bigint, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Put the checkpoint where a person says, back or forward, and record it. 1 done; 4 refused: an owner is live.
DECLARE
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
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    FOR UPDATE;
    INSERT INTO processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET last_processed_transaction_id = excluded.last_processed_transaction_id,
        last_processed_position = excluded.last_processed_position,
        stored_at = excluded.stored_at;
    INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
                               to_position, reason, decided_by)
    VALUES ('Rewind', p_processor_id, p_partition, v_stored.last_processed_transaction_id,
            v_stored.last_processed_position, p_transaction_id, p_position, p_reason, p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".resolve_conflict(
    p_conflict_id bigint, p_action text, p_transaction_id xid8, p_position bigint, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A person's decision: 'Accept' goes on from the stored pair, which must be the one that the person saw; 'Rewind' stores
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
        PERFORM keep_checkpoint(v_conflict.processor_id, v_conflict.partition);
        INSERT INTO recorded_acts (act, processor_id, partition, from_transaction_id, from_position, to_transaction_id,
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

CREATE OR REPLACE FUNCTION :"schema".stranger_refusals(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Refused calls of callers without an epoch. Approximate: a sequence may jump by up to 32 over a crash of the server.
SELECT coalesce(pg_sequence_last_value(to_regclass(quote_ident('strangers_' || md5(p_processor_id)))), 0)
$function$;

CREATE OR REPLACE FUNCTION :"schema".confirm_identity(p_action text, p_decided_by text DEFAULT session_user)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- After a copy or a move. 'keep': this is the same outbox in a new place (moved, restored, upgraded); the old place is no
-- longer used. 'renew': this is a copy and the original lives on; claims and leases that came along are dropped.
DECLARE
    v_uuid uuid;
BEGIN
    IF p_action IS NULL OR p_action NOT IN ('keep', 'renew') THEN
        RAISE EXCEPTION 'confirm_identity: % is neither keep nor renew', p_action
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'keep: the database moved. renew: it is a copy, the original lives on.';
    END IF;
    IF p_action = 'renew' THEN
        PERFORM end_leases(c.processor_id, NULL) FROM processor_claims c;
        DELETE FROM processor_claims;
    END IF;
    UPDATE database_identity i
    SET system_identifier = s.system_identifier,
        database_oid = d.oid,
        database_uuid = CASE p_action WHEN 'renew' THEN gen_random_uuid() ELSE i.database_uuid END,
        confirmed_at = clock_timestamp()
    FROM pg_control_system() AS s, pg_database AS d
    WHERE d.datname = current_database()
    RETURNING i.database_uuid INTO v_uuid;
    INSERT INTO recorded_acts (act, reason, decided_by)
    VALUES ('ConfirmIdentity', p_action, coalesce(p_decided_by, session_user));
    RETURN v_uuid;
END
$function$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
