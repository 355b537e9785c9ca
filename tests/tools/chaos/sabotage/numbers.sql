-- A worker that loads a checkpoint begins numbers of another name, so that a stream takes again what it has.
CREATE OR REPLACE FUNCTION outbox.open_publisher_numbers(
    p_processor_id text, p_partition int, p_mapping text, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (space uuid, last_number bigint) LANGUAGE sql AS $$
    INSERT INTO outbox.publisher_numbers AS n
        (processor_id, partition, space, place, mapping, transaction_id, position, last_number)
    SELECT c.processor_id, c.partition, gen_random_uuid(), '', p_mapping,
           c.last_processed_transaction_id, c.last_processed_position, 0
      FROM outbox.processor_checkpoints c
     WHERE c.processor_id = p_processor_id AND c.partition = p_partition
    ON CONFLICT (processor_id, partition) DO UPDATE
        SET space = excluded.space, transaction_id = excluded.transaction_id, position = excluded.position,
            last_number = 0
    RETURNING n.space, n.last_number
$$;
