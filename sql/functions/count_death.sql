CREATE OR REPLACE FUNCTION :"schema".count_death(p_processor_id text, p_partition int, p_released boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Called with a new epoch, once: the former owner gave the lease back, or it lapsed and its process is gone or frozen.
-- Deaths count while the checkpoint stays where it is; of a message only where it was tried alone, or was held. Who died
-- while so many messages were tried leaves those under suspicion; any other death leaves none.
DECLARE
    v_at timestamptz;
BEGIN
    IF p_released THEN
        UPDATE processor_suspicions s SET begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}'
        WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
        RETURN;
    END IF;
    SELECT c.stored_at INTO v_at FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
    UPDATE held_messages h SET deaths = h.deaths + 1
    FROM processor_suspicions s, unnest(s.held_transaction_ids, s.held_positions) AS w (transaction_id, position)
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = w.transaction_id AND h.position = w.position;
    INSERT INTO processor_suspicions AS s (processor_id, partition, deaths, checkpoint_at)
    VALUES (p_processor_id, p_partition, 1, v_at)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET deaths = CASE WHEN s.checkpoint_at = v_at THEN s.deaths + 1 ELSE 1 END,
        checkpoint_at = v_at,
        -- What was tried alone and not stored since.
        suspects = CASE WHEN s.begun_at > coalesce(v_at, '-infinity') THEN s.suspects ELSE 0 END,
        kills = s.kills + coalesce(s.suspects = 1 AND s.begun_at > coalesce(v_at, '-infinity'), false)::int,
        killed_at = CASE WHEN s.suspects = 1 AND s.begun_at > coalesce(v_at, '-infinity') THEN clock_timestamp()
                         ELSE s.killed_at END,
        begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}';
END
$function$;
