-- Claims: which resource owns a processor, which database and table it reads, and calls without a claim.

CREATE OR REPLACE FUNCTION :"schema".claim_key(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The key of the advisory lock that callers without an epoch share, and that the maker of a claim holds alone.
SELECT hashtextextended(format('outbox claim %s %s', current_schema(), p_processor_id), 0)
$function$;

CREATE OR REPLACE FUNCTION :"schema".claim_is_open_to(
    p_claim :"schema".processor_claims, p_cluster text, p_namespace text, p_name text, p_uid text, p_sweep_uids text[]
) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A claim is open to its own holder, to the same resource created again, to every resource 30 s after it was vacated, and
-- to the cluster that knows its own resource to be gone.
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
-- granted, though it was open to us: an owner is committing at this moment; ask again.
#variable_conflict use_column
DECLARE
    v_claim processor_claims;
    v_open boolean;
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
            v_open := claim_is_open_to(v_claim, p_cluster, p_namespace, p_name, p_uid, p_sweep_uids);
            IF NOT v_granted AND v_claim.processor_id IS NOT NULL AND (p_force OR v_open) THEN
                IF NOT v_open THEN
                    INSERT INTO audit_log (action, processor_id, reason, decided_by)
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
                IF to_regclass(quote_ident('unowned_calls_' || md5(p_processor_id))) IS NULL THEN
                    EXECUTE format('CREATE SEQUENCE IF NOT EXISTS %I', 'unowned_calls_' || md5(p_processor_id));
                END IF;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            v_granted := false;
        END;
    END IF;
    RETURN QUERY
        SELECT v_granted AND c.uid IS NOT NULL, c.cluster, c.namespace, c.name, c.uid, c.claimed_at, c.vacated_at
        FROM (VALUES (1)) AS always LEFT JOIN processor_claims c ON c.processor_id = p_processor_id;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".vacate_claim(p_processor_id text, p_uid text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Called by a process that stops and was not told why: other resources may claim after the grace period.
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
-- The holder names its successor, whose uid it need not know: no third resource can claim in between.
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

CREATE OR REPLACE FUNCTION :"schema".unowned_calls(p_processor_id text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Refused calls of callers without an epoch. Approximate: a sequence may jump by up to 32 over a crash of the server.
SELECT coalesce(pg_sequence_last_value(to_regclass(quote_ident('unowned_calls_' || md5(p_processor_id)))), 0)
$function$;

CREATE OR REPLACE FUNCTION :"schema".refuses_unowned_caller(p_processor_id text, p_partition int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a caller without epoch not store? True while a claim exists or an owner lives. Refused callers are counted in a
-- sequence, which their rollback does not undo. After a false answer no claim can be made until the caller's transaction ends.
DECLARE
    v_held boolean;
    v_sequence regclass := to_regclass(quote_ident('unowned_calls_' || md5(p_processor_id)));
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        v_held := EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id);
        IF NOT v_held THEN
            -- The statement after it sees each claim that was made before the lock was given. No row is left behind.
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

CREATE OR REPLACE FUNCTION :"schema".bind_processor_source(
    p_processor_id text, p_claim_uid text, p_source text, p_described text
) RETURNS TABLE (bound boolean, source text, described text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which database does the processor read? Its pairs mean nothing in another one. The claim's holder writes it down when
-- it first asks, or after it was forgotten; every other caller learns what is written. p_source null: this very database,
-- which needs no row. Bound: what is written is what was asked for.
#variable_conflict use_column
BEGIN
    IF p_source IS NOT NULL THEN
        -- Former versions wrote it down without the timeline.
        UPDATE processor_sources s
        SET source = p_source, described = p_described,
            bound_at = CASE WHEN s.source IS NULL THEN clock_timestamp() ELSE s.bound_at END
        WHERE s.processor_id = p_processor_id AND (s.source IS NULL OR starts_with(p_source, s.source || '/timeline-'))
          AND EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid);
        INSERT INTO processor_sources (processor_id, source, described)
        SELECT p_processor_id, p_source, p_described FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
          AND NOT EXISTS (SELECT 1 FROM processor_checkpoints k WHERE k.processor_id = p_processor_id)
        ON CONFLICT DO NOTHING;
    END IF;
    -- Another process of the resource may have written it down at this moment.
    SELECT s.source, s.described INTO source, described FROM processor_sources s WHERE s.processor_id = p_processor_id;
    bound := CASE WHEN FOUND THEN coalesce(source = p_source, false) ELSE p_source IS NULL END;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".forget_processor_source(p_processor_id text, p_reason text, p_decided_by text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The source moved, or is a copy that a user takes for the original: the next holder of the claim writes down what it reads.
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
    INSERT INTO audit_log (action, processor_id, reason, decided_by)
    VALUES ('ForgetSource', p_processor_id, format('%s (it read %s)', p_reason, v_described), p_decided_by);
    RETURN 1;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".note_mapping(
    p_processor_id text, p_claim_uid text, p_table_schema text, p_table_name text, p_columns jsonb,
    p_publications text[], p_message_types text[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which table the claim's holder reads, under which columns and filters: for a person who counts or deletes messages.
-- Nothing is written where it is written down already. p_table_name null: `messages` of this schema.
BEGIN
    INSERT INTO processor_mappings AS m
        (processor_id, table_schema, table_name, columns, publications, message_types)
    SELECT p_processor_id, p_table_schema, p_table_name, p_columns, p_publications, p_message_types
    FROM processor_claims c
    WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
      AND NOT EXISTS (
          SELECT 1 FROM processor_mappings k
          WHERE k.processor_id = p_processor_id
            AND (k.table_schema, k.table_name, k.columns, k.publications, k.message_types)
                IS NOT DISTINCT FROM (p_table_schema, p_table_name, p_columns, p_publications, p_message_types))
    ON CONFLICT (processor_id) DO UPDATE
    SET table_schema = p_table_schema, table_name = p_table_name, columns = p_columns,
        publications = p_publications, message_types = p_message_types, noted_at = clock_timestamp();
    RETURN FOUND;
END
$function$;
