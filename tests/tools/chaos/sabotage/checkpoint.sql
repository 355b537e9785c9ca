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

CREATE OR REPLACE FUNCTION outbox.store_processor_range(
    p_processor_id text, p_partition int,
    p_new_counter bigint, p_new_lower pg_snapshot, p_new_upper pg_snapshot, p_new_position bigint,
    p_expected_counter bigint, p_expected_lower pg_snapshot, p_expected_upper pg_snapshot, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS integer LANGUAGE sql AS $$
    INSERT INTO outbox.processor_checkpoints
        (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind, lower_snapshot,
         upper_snapshot, range_position)
    VALUES (p_processor_id, p_partition, '0', p_new_counter, 'Snapshot', p_new_lower, p_new_upper, p_new_position)
    ON CONFLICT (processor_id, partition) DO UPDATE
        SET last_processed_position = p_new_counter, lower_snapshot = p_new_lower, upper_snapshot = p_new_upper,
            range_position = p_new_position;
    SELECT 1
$$;
