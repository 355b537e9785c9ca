CREATE OR REPLACE FUNCTION :"schema".review_lane(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_generation bigint, p_forgive boolean
) RETURNS TABLE (owned boolean, any_held boolean, blocking boolean, deaths int, kills int, suspects int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What a new owner must know: whether anything is held, and of what former owners died. What was given up is tried
-- again, as after every restart; what killed processes is not, unless the resource was changed since, or the handler
-- (`p_forgive`).
#variable_conflict use_column
DECLARE
    v_forgiven boolean;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        UPDATE processor_suspicions s SET generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition AND s.generation IS NULL;
        UPDATE processor_suspicions s SET kills = 0, deaths = 0, suspects = 0, accused = '{}', accused_alone = '{}', generation = p_generation
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition
          AND (s.generation <> p_generation OR p_forgive);
        v_forgiven := FOUND;
        IF v_forgiven THEN
            UPDATE held_messages h SET deaths = 0
            WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.deaths > 0;
        END IF;
        UPDATE held_messages h SET next_attempt_at = clock_timestamp(), attempts = 0
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.next_attempt_at = 'infinity'
          AND NOT h.behind AND (h.error_class <> 'ProcessKilled' OR v_forgiven OR p_forgive);
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
    -- What happened before the checkpoint was last stored is over.
    SELECT CASE WHEN s.checkpoint_at = c.stored_at THEN s.deaths ELSE 0 END,
           CASE WHEN s.killed_at > c.stored_at THEN s.kills ELSE 0 END,
           CASE WHEN s.checkpoint_at = c.stored_at THEN s.suspects ELSE 0 END
    INTO deaths, kills, suspects
    FROM processor_suspicions s
    JOIN processor_checkpoints c ON c.processor_id = s.processor_id AND c.partition = s.partition
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    RETURN NEXT;
END
$function$;
