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
