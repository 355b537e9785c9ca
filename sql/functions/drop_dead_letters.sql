CREATE OR REPLACE FUNCTION :"schema".drop_dead_letters(
    p_processor_id text, p_partition int, p_ids bigint[], p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Dead letters that shall never be handled: what waits behind them goes on. Each is recorded by its message id.
DECLARE
    v_keys text[];
BEGIN
    PERFORM lock_lane(p_processor_id, p_partition);
    WITH gone AS (
        DELETE FROM dead_letters d
        WHERE d.processor_id = p_processor_id AND d.partition = p_partition AND d.id = ANY (p_ids)
        RETURNING d.*
    ), acts AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'DropDeadLetter', g.processor_id, g.partition, g.transaction_id, g.position,
               format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason), p_decided_by
        FROM gone g ORDER BY g.id
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;
