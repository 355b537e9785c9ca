CREATE OR REPLACE FUNCTION :"schema".decide_held_messages(
    p_processor_id text, p_partition int, p_places bigint[], p_drop boolean, p_reason text, p_decided_by text
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Held messages whose attempts ran out and that stop their key: try them again now, or drop them for good. Recorded.
DECLARE
    v_keys text[];
BEGIN
    PERFORM lock_lane(p_processor_id, p_partition);
    IF p_drop THEN
        WITH gone AS (
            DELETE FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.*
        ), acts AS (
            INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
            SELECT 'DropHeldMessage', g.processor_id, g.partition, g.transaction_id, g.position,
                   format('message %s of type %s, key %s: %s', g.message_id, g.message_type, g.key, p_reason),
                   p_decided_by
            FROM gone g ORDER BY g.place
        )
        SELECT array_agg(g.key) INTO v_keys FROM gone g;
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    ELSE
        WITH again AS (
            UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0, deaths = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (p_places)
              AND NOT h.behind AND h.next_attempt_at = 'infinity'
            RETURNING h.key
        )
        SELECT array_agg(a.key) INTO v_keys FROM again a;
        IF v_keys IS NOT NULL THEN
            INSERT INTO recorded_acts (act, processor_id, partition, reason, decided_by)
            VALUES ('Redrive', p_processor_id, p_partition,
                    format('%s held messages: %s', cardinality(v_keys), p_reason), p_decided_by);
        END IF;
    END IF;
    RETURN coalesce(cardinality(v_keys), 0);
END
$function$;
