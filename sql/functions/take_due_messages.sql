CREATE OR REPLACE FUNCTION :"schema".take_due_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_limit int, p_payload boolean
) RETURNS TABLE (
    owned boolean, next_in double precision, blocking boolean, transaction_id xid8, "position" bigint, key text,
    message_id text, message_type text, publication_id text, partition_key text, data text, metadata text,
    scheduled timestamptz, attempts int, deaths int
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The held messages to be tried now, in order of their keys, and written down as begun: should the process die of one,
-- the next owner knows. One that a process died of comes alone. Always one row at least; without a message it says in
-- how many seconds there is one (null: never by itself), and whether later messages of some key must wait.
#variable_conflict use_column
DECLARE
    v_places bigint[];
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF NOT owned THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- A delayed one that is due takes its place: behind what blocks its key. So does one of several that a person had
    -- tried again: behind the first of its key.
    UPDATE held_messages h SET behind = true, blocks = true
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
      AND h.next_attempt_at <= clock_timestamp() AND h.attempts = 0
      AND CASE WHEN h.blocks
               THEN EXISTS (SELECT 1 FROM held_messages f
                            WHERE f.processor_id = p_processor_id AND f.partition = p_partition AND f.key_hash = h.key_hash
                              AND f.key = h.key AND f.blocks AND NOT f.behind AND f.place < h.place)
               ELSE is_key_blocked(p_processor_id, p_partition, h.key, h.place) END;
    WITH heads AS MATERIALIZED (
        SELECT h.place, h.key, h.key_hash, h.attempts, h.deaths, h.blocks, h.next_attempt_at FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
          AND h.next_attempt_at <= clock_timestamp()
        ORDER BY h.next_attempt_at, h.place LIMIT p_limit
    ), chosen AS (
        SELECT h.place FROM heads h WHERE NOT EXISTS (SELECT 1 FROM heads s WHERE s.deaths > 0)
        UNION ALL
        SELECT f.place FROM heads h
        CROSS JOIN LATERAL (
            -- Up to the first that is not to be tried with others: none of its key overtakes it.
            SELECT n.place, bool_and(n.behind AND n.deaths = 0) OVER (ORDER BY n.place) AS free
            FROM (SELECT b.place, b.behind, b.deaths FROM held_messages b
                  WHERE b.processor_id = p_processor_id AND b.partition = p_partition AND b.key_hash = h.key_hash
                    AND b.key = h.key AND b.blocks AND b.place > h.place
                  ORDER BY b.place LIMIT p_limit) AS n) AS f
        WHERE f.free AND h.attempts = 0 AND h.blocks AND NOT EXISTS (SELECT 1 FROM heads s WHERE s.deaths > 0)
          AND NOT is_key_blocked(p_processor_id, p_partition, h.key, h.place)
        UNION ALL
        (SELECT s.place FROM heads s WHERE s.deaths > 0 ORDER BY s.next_attempt_at, s.place LIMIT 1)
    )
    SELECT array_agg(c.place) INTO v_places FROM (SELECT place FROM chosen ORDER BY place LIMIT p_limit) AS c;
    IF v_places IS NULL THEN
        SELECT extract(epoch FROM min(h.next_attempt_at) - clock_timestamp()) INTO next_in FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND NOT h.behind
          AND h.next_attempt_at < 'infinity';
        blocking := EXISTS (SELECT 1 FROM held_messages h WHERE h.processor_id = p_processor_id
                            AND h.partition = p_partition AND h.blocks)
            OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.processor_id = p_processor_id
                       AND d.partition = p_partition AND d.blocks);
        RETURN NEXT;
        RETURN;
    END IF;
    INSERT INTO processor_suspicions AS s (processor_id, partition, held_transaction_ids, held_positions)
    SELECT p_processor_id, p_partition, array_agg(h.transaction_id ORDER BY h.place), array_agg(h.position ORDER BY h.place)
    FROM held_messages h
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_places)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET held_transaction_ids = excluded.held_transaction_ids, held_positions = excluded.held_positions;
    RETURN QUERY
        SELECT true, 0::double precision, true, h.transaction_id, h.position, h.key, h.message_id, h.message_type,
               h.publication_id, h.partition_key, CASE WHEN p_payload THEN h.data END,
               CASE WHEN p_payload THEN h.metadata END, h.scheduled, h.attempts, h.deaths
        FROM held_messages h
        WHERE h.processor_id = p_processor_id AND h.partition = p_partition AND h.place = ANY (v_places)
        ORDER BY h.place;
END
$function$;
