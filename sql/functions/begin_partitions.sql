CREATE OR REPLACE FUNCTION :"schema".begin_partitions(
    p_processor_id text, p_count int, p_key text, p_transaction_id xid8, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, partition_count int, key text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first owner of any partition writes down how the processor is divided and the one pair from which all of it
-- starts: a partition that is first owned later must not start later. Everybody else learns what was written.
-- No row (partition_count null): the processor has a checkpoint but was never divided.
#variable_conflict use_column
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    begun := false;
    IF owned AND p_transaction_id IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE c.processor_id = p_processor_id) THEN
        -- Of two at once, the other waits here until this one committed.
        INSERT INTO processor_partitions (processor_id, partition_count, key)
        VALUES (p_processor_id, p_count, p_key) ON CONFLICT DO NOTHING;
        begun := FOUND;
        IF begun THEN
            INSERT INTO processor_checkpoints
                (processor_id, partition, last_processed_transaction_id, last_processed_position)
            SELECT p_processor_id, n, p_transaction_id, p_position FROM generate_series(0, p_count - 1) AS n
            ON CONFLICT DO NOTHING;
            PERFORM keep_checkpoint(p_processor_id, NULL);
        END IF;
    END IF;
    SELECT d.partition_count, d.key INTO partition_count, key
    FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;
