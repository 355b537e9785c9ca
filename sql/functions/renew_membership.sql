CREATE OR REPLACE FUNCTION :"schema".renew_membership(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (partition int, epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat of a process that owns some of the partitions: it is one of the members among which they are divided,
-- and so long it keeps what it owns. Both lapse together. Returned: the leases that are still its own.
#variable_conflict use_column
BEGIN
    INSERT INTO processor_members AS m (processor_id, token, pod, claim_uid, expires_at)
    SELECT p_processor_id, p_token, p_pod, p_claim_uid, clock_timestamp() + p_lease
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE SET expires_at = clock_timestamp() + p_lease;
    DELETE FROM processor_members m
    USING (SELECT g.token FROM processor_members g
           WHERE g.processor_id = p_processor_id AND g.expires_at < clock_timestamp() - p_lease
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE m.processor_id = p_processor_id AND m.token = gone.token;
    RETURN QUERY
        UPDATE processor_leases l
        SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease
        WHERE l.processor_id = p_processor_id AND l.token = p_token AND l.expires_at > clock_timestamp()
        RETURNING l.partition, l.epoch;
END
$function$;
