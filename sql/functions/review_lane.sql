CREATE OR REPLACE FUNCTION :"schema".review_lane(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_generation bigint, p_deaths int
) RETURNS TABLE (
    owned boolean, any_held boolean, blocking boolean, deaths int, transaction_id xid8, "position" bigint, kills int
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What a new owner must know: whether anything is held, and of what former owners died. What was given up is tried
-- again, as after every restart; what killed `p_deaths` processes is not, unless the resource was changed since.
#variable_conflict use_column
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        UPDATE processor_suspicions s SET generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.generation IS NULL;
        UPDATE processor_suspicions s SET kills = 0, deaths = 0, generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.generation <> p_generation;
        IF FOUND THEN
            UPDATE held_messages h SET deaths = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.deaths > 0;
        END IF;
        UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.next_attempt_at = 'infinity'
          AND NOT h.behind AND h.deaths < p_deaths;
        -- Whoever changed the table by hand may have left a key without one that is due.
        PERFORM advance_keys(p_processor_id, p_partition, (
            SELECT array_agg(DISTINCT h.key) FROM held_messages h
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.behind));
    END IF;
    any_held := EXISTS (SELECT 1 FROM held_messages h
                        WHERE h.processor_id = p_processor_id AND h.partition = p_partition);
    blocking := EXISTS (SELECT 1 FROM held_messages h WHERE h.processor_id = p_processor_id
                        AND h.partition = p_partition AND h.blocks)
        OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.processor_id = p_processor_id
                   AND d.partition = p_partition AND d.blocks);
    SELECT s.deaths, s.transaction_id, s.position, s.kills INTO deaths, transaction_id, "position", kills
    FROM processor_suspicions s WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN NEXT;
END
$function$;
