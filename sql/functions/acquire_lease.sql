CREATE OR REPLACE FUNCTION :"schema".acquire_lease(
    p_processor_id text, p_partition int, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (acquired boolean, epoch bigint, pod text, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A fresh epoch for the process that holds `p_token`. Refused: another process is alive, the claim is another's, a
-- conflict waits for a person, or the former owner is committing at this moment. Answers who holds the lease after the call;
-- no epoch, where the processor has no such partition (any more): the caller's division is old.
-- A former owner that never gave its lease back is counted as dead: a message may be what it died of. One that calls again
-- lives, and was not killed by anything.
#variable_conflict use_column
DECLARE
    v_lease processor_leases;
    v_refused boolean;
BEGIN
    PERFORM acquit_survivor(p_processor_id, p_partition, p_token);
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
            -- Against a change of their number, which begins by locking this row. Nothing to lock: it is not divided.
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
            v_refused := v_refused
                OR coalesce(v_lease.expires_at > clock_timestamp() AND v_lease.token <> p_token, false);
            IF NOT v_refused THEN
                UPDATE processor_leases l
                SET epoch = l.epoch + 1, token = p_token, pod = p_pod, claim_uid = p_claim_uid,
                    acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
                    expires_at = clock_timestamp() + p_lease
                WHERE l.processor_id = p_processor_id AND l.partition = p_partition;
                IF v_lease.token IS DISTINCT FROM p_token AND v_lease.epoch > 0 THEN
                    PERFORM count_death(p_processor_id, p_partition, v_lease.token);
                END IF;
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
