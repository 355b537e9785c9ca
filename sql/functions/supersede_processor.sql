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
