-- Numbers by which a broker drops messages that it has already. One number must never be given to two messages: the second
-- would be dropped, and confirmed. So what is not certain begins numbers of a new name, which at worst repeats messages.

CREATE OR REPLACE FUNCTION :"schema".open_publisher_numbers(
    p_processor_id text, p_partition int, p_mapping text, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (space uuid, last_number bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The numbers after the stored checkpoint, for its owner, who has just loaded it; no row for anyone else. Goes on with those stored beside this
-- very checkpoint in this place with this mapping; otherwise new ones begin. Commit before publishing: a successor must use
-- the same, or ones of another name. Cursor TransactionOrder only: what a snapshot range will hold is not decided before it is stored.
DECLARE
    v_place text;
    v_stored processor_checkpoints;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN;
    END IF;
    SELECT c.* INTO v_stored FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = p_partition AND c.cursor_kind = 'TransactionOrder';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- A failover, a restore, a copy that lives beside the original, ids that were rebased: other messages may come next than before.
    SELECT concat_ws('/', s.system_identifier, d.oid, current_timeline(), i.database_uuid, i.rebased) INTO v_place
    FROM pg_control_system() s, pg_database d, database_identity i WHERE d.datname = current_database();
    RETURN QUERY
    INSERT INTO publisher_numbers AS n (processor_id, partition, space, place, mapping, transaction_id, "position", last_number)
    VALUES (p_processor_id, p_partition, gen_random_uuid(), v_place, p_mapping,
            v_stored.last_processed_transaction_id, v_stored.last_processed_position, 0)
    ON CONFLICT (processor_id, partition) DO UPDATE
    SET (space, place, mapping, transaction_id, "position", last_number) = (
        SELECT k.space, k.place, k.mapping, k.transaction_id, k."position", k.last_number
        FROM (SELECT n.space, n.place, n.mapping, n.transaction_id, n."position", n.last_number
              WHERE (n.place, n.mapping, n.transaction_id, n."position")
                    = (excluded.place, excluded.mapping, excluded.transaction_id, excluded."position")
              UNION ALL
              SELECT excluded.space, excluded.place, excluded.mapping, excluded.transaction_id, excluded."position", 0) AS k
        LIMIT 1)
    RETURNING n.space, n.last_number;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_publisher_number(
    p_processor_id text, p_partition int, p_space uuid, p_transaction_id xid8, p_position bigint, p_number bigint
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint, once that is stored: the number of the last message that it has passed. Numbers that begun anew since
-- are left as they are: they then name another checkpoint, and count for nothing.
UPDATE publisher_numbers n
SET transaction_id = p_transaction_id, "position" = p_position, last_number = p_number
WHERE n.processor_id = p_processor_id AND n.partition = p_partition AND n.space = p_space
$function$;
