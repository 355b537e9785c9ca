CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_partition int,
    p_new_transaction_id xid8, p_new_position bigint,
    p_expected_transaction_id xid8, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off
AS $function$
-- 1 stored, 0 ignored (already there), 2 further ahead, 3 older, 4 not the owner. Everything but 1: roll back.
-- The steps are those of the contract's table, in its order; the row is locked before it is compared. It is found by its
-- latest generation (see processor_checkpoints_newest) and updated in its place.
DECLARE
    v_stored record;
BEGIN
    -- step 1
    IF p_processor_id IS NULL OR p_partition IS NULL OR p_new_transaction_id IS NULL OR p_new_position IS NULL
       OR (p_expected_transaction_id IS NULL) <> (p_expected_position IS NULL) THEN
        RAISE EXCEPTION 'half a checkpoint: new %:%, expected %:%', p_new_transaction_id, p_new_position,
            p_expected_transaction_id, p_expected_position
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Name both parts of a pair, transaction_id and position.';
    END IF;
    IF (p_new_transaction_id, p_new_position) <= (p_expected_transaction_id, p_expected_position) THEN
        RAISE EXCEPTION 'a checkpoint never moves back: new %:% is not after expected %:%', p_new_transaction_id,
            p_new_position, p_expected_transaction_id, p_expected_position
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rewind_processor_checkpoint() is the recorded way back.';
    END IF;
    -- step 2
    IF p_epoch IS NULL AND p_owner_token IS NULL THEN
        IF refuses_stranger(p_processor_id, p_partition) THEN
            RETURN 4;
        END IF;
    ELSIF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN 4;
    END IF;
    LOOP
        SELECT c.ctid AS place, c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id || '' = p_processor_id AND c.partition = p_partition
        ORDER BY c.generation DESC LIMIT 1
        FOR UPDATE;
        EXIT WHEN FOUND;
        IF p_expected_position IS NOT NULL
           AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
            RETURN 3;  -- step 5
        END IF;
        -- Of two callers one inserts; an old snapshot that cannot see the other's row gets 40001 here.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, p_partition, p_new_transaction_id, p_new_position)
        ON CONFLICT DO NOTHING;
        IF FOUND AND p_expected_position IS NOT NULL THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
            RETURN 3;  -- step 5
        ELSIF FOUND THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
            RETURN 1;  -- step 4
        END IF;
    END LOOP;
    IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
       = (p_new_transaction_id, p_new_position) THEN
        RETURN 0;  -- step 3
    ELSIF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
          = (p_expected_transaction_id, p_expected_position) THEN
        UPDATE processor_checkpoints c
        SET last_processed_transaction_id = p_new_transaction_id,
            last_processed_position = p_new_position,
            kept_transaction_id = p_new_transaction_id,
            kept_position = p_new_position,
            generation = c.generation + (random() < 0.01)::int,
            stored_at = clock_timestamp()
        WHERE c.ctid = v_stored.place;
        IF v_stored.kept_position IS NULL THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
        END IF;
        RETURN 1;  -- step 6
    ELSIF p_expected_position IS NULL
          OR (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
             > (p_expected_transaction_id, p_expected_position) THEN
        RETURN 2;  -- step 7
    END IF;
    RETURN 3;  -- step 8
END
$function$;
