CREATE OR REPLACE FUNCTION :"schema".store_processor_window(
    p_processor_id text, p_partition int,
    p_new_counter bigint, p_new_lower pg_snapshot, p_new_upper pg_snapshot, p_new_position bigint,
    p_expected_counter bigint, p_expected_lower pg_snapshot, p_expected_upper pg_snapshot, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off
AS $function$
-- The checkpoint contract for the cursor Snapshot, with the counter in place of the pair: 1 stored, 0 ignored (already
-- there), 2 further ahead, 3 older, 4 not the owner. The same counter with another window is 2. Everything but 1: roll
-- back. The row is locked before it is compared; it is found by its latest generation, as in store_processor_checkpoint.
DECLARE
    v_stored record;
    v_window text;
    v_new text := concat_ws('/', p_new_lower::text, p_new_upper::text, p_new_position);
    v_expected text := concat_ws('/', p_expected_lower::text, p_expected_upper::text, p_expected_position);
BEGIN
    -- step 1
    IF p_processor_id IS NULL OR p_partition IS NULL OR p_new_counter IS NULL
       OR (p_new_upper IS NULL) <> (p_new_position IS NULL)
       OR (p_expected_upper IS NULL) <> (p_expected_position IS NULL)
       OR p_expected_counter IS NULL AND v_expected <> '' THEN
        RAISE EXCEPTION 'half a checkpoint: new % (%), expected % (%)', p_new_counter, v_new, p_expected_counter, v_expected
            USING ERRCODE = 'null_value_not_allowed',
                  HINT = 'Name the counter; an upper snapshot goes with a position inside the window.';
    END IF;
    IF p_new_counter < 1 OR p_new_counter <= p_expected_counter
       OR p_expected_lower IS NOT NULL
          AND (p_new_lower IS NULL OR pg_snapshot_xmax(p_new_lower) < pg_snapshot_xmax(p_expected_lower)) THEN
        RAISE EXCEPTION 'a checkpoint never moves back: new % (%) is not after expected % (%)', p_new_counter, v_new,
            p_expected_counter, v_expected
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rewind_processor_window() is the recorded way back.';
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
        IF p_expected_counter IS NOT NULL
           AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
            RETURN 3;  -- step 5
        END IF;
        -- Of two callers one inserts; an old snapshot that cannot see the other's row gets 40001 here.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind,
             lower_snapshot, upper_snapshot, window_position)
        VALUES (p_processor_id, p_partition, '0', p_new_counter, 'Snapshot', p_new_lower, p_new_upper, p_new_position)
        ON CONFLICT DO NOTHING;
        IF FOUND AND p_expected_counter IS NOT NULL THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
            RETURN 3;  -- step 5
        ELSIF FOUND THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
            RETURN 1;  -- step 4
        END IF;
    END LOOP;
    IF v_stored.cursor_kind <> 'Snapshot' THEN
        RAISE EXCEPTION 'the checkpoint of % is a pair, cursor %: a window means nothing to it', p_processor_id,
            v_stored.cursor_kind
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use another processorId for the cursor Snapshot.';
    END IF;
    v_window := concat_ws('/', v_stored.lower_snapshot::text, v_stored.upper_snapshot::text, v_stored.window_position);
    IF v_stored.last_processed_position = p_new_counter THEN
        RETURN CASE WHEN v_window = v_new THEN 0 ELSE 2 END;  -- step 3
    ELSIF v_stored.last_processed_position = p_expected_counter AND v_window = v_expected THEN
        UPDATE processor_checkpoints c
        SET last_processed_position = p_new_counter,
            lower_snapshot = p_new_lower,
            upper_snapshot = p_new_upper,
            window_position = p_new_position,
            kept_transaction_id = '0',
            kept_position = p_new_counter,
            kept_window = window_seal(p_new_lower, p_new_upper, p_new_position),
            generation = c.generation + (random() < 0.01)::int,
            stored_at = clock_timestamp()
        WHERE c.ctid = v_stored.place;
        IF v_stored.kept_position IS NULL THEN
            PERFORM keep_checkpoint(p_processor_id, p_partition);
        END IF;
        RETURN 1;  -- step 6
    ELSIF p_expected_counter IS NULL OR v_stored.last_processed_position >= p_expected_counter THEN
        RETURN 2;  -- step 7
    END IF;
    RETURN 3;  -- step 8
END
$function$;
