CREATE OR REPLACE FUNCTION :"schema".settle_held_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid,
    p_transaction_ids xid8[], p_positions bigint[]
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of their effects: held messages are handled. -1: not the owner. Else how many were still held; less
-- than were named means that they were handled or dropped before: roll back.
DECLARE
    v_keys text[];
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    WITH gone AS (
        DELETE FROM held_messages h
        USING unnest(p_transaction_ids, p_positions) AS w (transaction_id, position)
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition
          AND h.transaction_id = w.transaction_id AND h.position = w.position
        RETURNING h.key
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;
