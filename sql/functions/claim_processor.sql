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
