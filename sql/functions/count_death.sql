CREATE OR REPLACE FUNCTION :"schema".count_death(p_processor_id text, p_partition int, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Called with a new epoch, once: the former owner gave the lease back (p_token null), or it lapsed and its process is gone,
-- frozen, or cut off; that one takes its death back when it comes again (acquit_survivor).
-- Deaths count while the checkpoint stays where it is; of a message only where it was tried alone, or was held. Who died
-- while so many messages were tried leaves those under suspicion; any other death leaves none.
DECLARE
    v_at timestamptz;
    v_alone uuid[];
BEGIN
    IF p_token IS NULL THEN
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
    -- What was tried alone and not stored since.
    SELECT ARRAY[p_token] INTO v_alone FROM processor_suspicions s
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition
      AND s.suspects = 1 AND s.begun_at > coalesce(v_at, '-infinity');
    INSERT INTO processor_suspicions AS s (processor_id, partition, deaths, checkpoint_at, accused)
    VALUES (p_processor_id, p_partition, 1, v_at, ARRAY[p_token])
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET deaths = CASE WHEN s.checkpoint_at = v_at THEN s.deaths + 1 ELSE 1 END,
        checkpoint_at = v_at,
        accused = CASE WHEN s.checkpoint_at = v_at THEN s.accused || p_token ELSE ARRAY[p_token] END,
        suspects = CASE WHEN s.begun_at > coalesce(v_at, '-infinity') THEN s.suspects ELSE 0 END,
        kills = s.kills + coalesce(cardinality(v_alone), 0),
        accused_alone = s.accused_alone || v_alone,
        killed_at = CASE WHEN v_alone IS NULL THEN s.killed_at ELSE clock_timestamp() END,
        died_token = CASE WHEN s.held_positions = '{}' THEN s.died_token ELSE p_token END,
        died_transaction_ids = CASE WHEN s.held_positions = '{}' THEN s.died_transaction_ids ELSE s.held_transaction_ids END,
        died_positions = CASE WHEN s.held_positions = '{}' THEN s.died_positions ELSE s.held_positions END,
        begun_at = NULL, held_transaction_ids = '{}', held_positions = '{}';
END
$function$;
