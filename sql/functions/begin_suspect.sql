CREATE OR REPLACE FUNCTION :"schema".begin_suspect(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_generation bigint, p_suspects int
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Two owners died at this checkpoint: write down how many messages are tried now, before they are; the last one is the one
-- named. -1: not the owner. Else how many processes died of this very message, which was tried alone.
DECLARE
    v_kills int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    INSERT INTO processor_suspicions AS s
        (processor_id, partition, transaction_id, position, begun_at, generation, suspects)
    VALUES (p_processor_id, p_partition, p_transaction_id, p_position, clock_timestamp(), p_generation, p_suspects)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET transaction_id = p_transaction_id, position = p_position, begun_at = clock_timestamp(),
        generation = p_generation, suspects = p_suspects,
        kills = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.kills ELSE 0 END,
        accused_alone = CASE WHEN (s.transaction_id, s.position) = (p_transaction_id, p_position) THEN s.accused_alone
                             ELSE '{}' END
    RETURNING s.kills INTO v_kills;
    RETURN v_kills;
END
$function$;
