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
-- copy (find_edit) whether somebody edited it, and a person may have decided by now. Nor after a change of the number of
-- partitions, which ends every epoch and is waited for.
DECLARE
    v_id bigint;
BEGIN
    IF p_needs_person THEN
        PERFORM 1 FROM processor_leases s
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition FOR KEY SHARE;
    END IF;
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
