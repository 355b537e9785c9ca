-- A checkpoint is stored whatever was stored before, by whoever calls.
CREATE OR REPLACE FUNCTION outbox.store_processor_checkpoint(
    p_processor_id text, p_partition integer, p_new_transaction_id xid8, p_new_position bigint,
    p_expected_transaction_id xid8, p_expected_position bigint, p_epoch bigint, p_owner_token uuid
) RETURNS integer LANGUAGE sql AS $$
    INSERT INTO outbox.processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position)
    VALUES (p_processor_id, p_partition, p_new_transaction_id, p_new_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
        SET last_processed_transaction_id = p_new_transaction_id, last_processed_position = p_new_position;
    SELECT 1
$$;
