-- Checkpoints: the contract of storing one, its shadow checkpoint by which a change by hand shows, and its confirmation.

CREATE OR REPLACE FUNCTION :"schema".range_digest(p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint)
RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A snapshot range in 16 bytes: its shadow need not be as long as a list of transactions in progress can be.
SELECT md5(coalesce(p_lower::text, '') || '/' || coalesce(p_upper::text, '') || '/'
           || coalesce(p_position::text, ''))::uuid
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_shadow_checkpoint(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Writes the shadow checkpoint anew from the row: for functions of ours that have just written the row otherwise than by the
-- contract's step 6, and where a user accepts what the row says. Partition null: all partitions.
BEGIN
    UPDATE processor_checkpoints c
    SET shadow_transaction_id = c.last_processed_transaction_id, shadow_position = c.last_processed_position,
        shadow_range = CASE c.cursor_kind
                      WHEN 'Snapshot' THEN range_digest(c.lower_snapshot, c.upper_snapshot, c.range_position) END
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition);
    INSERT INTO shadow_checkpoints (processor_id, partition)
    SELECT c.processor_id, c.partition FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition)
    ON CONFLICT DO NOTHING;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".find_tampering(p_processor_id text, p_partition int)
RETURNS TABLE (shadow_transaction_id xid8, shadow_position bigint, transaction_id xid8, "position" bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The tamper check: one row if the checkpoint was changed or deleted without our functions, with the pair that they had
-- stored (null: the whole row was written by hand) and the one that is there (null: none). It finds mistakes, not forgery: the
-- shadow is in the row, and a role that may write the row can write the shadow too. A first row inserted by hand passes.
-- VOLATILE: it sees what was committed until it is called, also where the statement that calls it began before.
SELECT c.shadow_transaction_id, c.shadow_position, c.last_processed_transaction_id, c.last_processed_position
FROM shadow_checkpoints k
LEFT JOIN processor_checkpoints c ON c.processor_id = k.processor_id AND c.partition = k.partition
WHERE k.processor_id = p_processor_id AND k.partition = p_partition
  AND (c.shadow_position IS NULL
       OR (c.shadow_transaction_id, c.shadow_position) <> (c.last_processed_transaction_id, c.last_processed_position)
       OR c.shadow_range IS DISTINCT FROM CASE c.cursor_kind
          WHEN 'Snapshot' THEN range_digest(c.lower_snapshot, c.upper_snapshot, c.range_position) END)
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_checkpoint(
    p_cursor_kind text, p_processor_id text, p_partition int,
    p_new_transaction_id xid8, p_new_position bigint,
    p_new_lower pg_snapshot, p_new_upper pg_snapshot, p_new_range_position bigint,
    p_expected_transaction_id xid8, p_expected_position bigint,
    p_expected_lower pg_snapshot, p_expected_upper pg_snapshot, p_expected_range_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off
AS $function$
-- The contract of storing a checkpoint, for both cursors; step 1 is its callers'. 1 stored, 0 ignored (already there), 2 further
-- ahead, 3 older, 4 not the owner. Everything but 1: roll back. The steps are those of the contract's table, in its order; the
-- row is locked before it is compared. It is found by its latest generation (see processor_checkpoints_newest) and updated in
-- its place. Of the cursor Snapshot the pair is (0, counter), and the same counter with another snapshot range is 2.
DECLARE
    v_stored record;
    v_range text := '';  -- a pair has none
    v_new text := concat_ws('/', p_new_lower::text, p_new_upper::text, p_new_range_position);
    v_expected text := concat_ws('/', p_expected_lower::text, p_expected_upper::text, p_expected_range_position);
BEGIN
    -- step 2
    IF p_epoch IS NULL AND p_owner_token IS NULL THEN
        IF refuses_unowned_caller(p_processor_id, p_partition) THEN
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
            (processor_id, partition, last_processed_transaction_id, last_processed_position, cursor_kind,
             lower_snapshot, upper_snapshot, range_position)
        VALUES (p_processor_id, p_partition, p_new_transaction_id, p_new_position, p_cursor_kind, p_new_lower,
                p_new_upper, p_new_range_position)
        ON CONFLICT DO NOTHING;
        IF FOUND AND p_expected_position IS NOT NULL THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
            RETURN 3;  -- step 5
        ELSIF FOUND THEN
            PERFORM store_shadow_checkpoint(p_processor_id, p_partition);
            RETURN 1;  -- step 4
        END IF;
    END LOOP;
    IF v_stored.cursor_kind <> p_cursor_kind AND (p_cursor_kind = 'Snapshot'
       OR (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
          = (p_expected_transaction_id, p_expected_position)) THEN
        RAISE EXCEPTION 'the checkpoint of % is of cursor %: one of cursor % means nothing to it', p_processor_id,
            v_stored.cursor_kind, p_cursor_kind
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use another processorId for the other cursor.';
    END IF;
    IF p_cursor_kind = 'Snapshot' THEN
        v_range := concat_ws('/', v_stored.lower_snapshot::text, v_stored.upper_snapshot::text, v_stored.range_position);
    END IF;
    IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
       = (p_new_transaction_id, p_new_position) THEN
        RETURN CASE WHEN v_range = v_new THEN 0 ELSE 2 END;  -- step 3
    ELSIF (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
          = (p_expected_transaction_id, p_expected_position) AND v_range = v_expected THEN
        UPDATE processor_checkpoints c
        SET last_processed_transaction_id = p_new_transaction_id,
            last_processed_position = p_new_position,
            lower_snapshot = p_new_lower,
            upper_snapshot = p_new_upper,
            range_position = p_new_range_position,
            shadow_transaction_id = p_new_transaction_id,
            shadow_position = p_new_position,
            shadow_range = CASE p_cursor_kind
                WHEN 'Snapshot' THEN range_digest(p_new_lower, p_new_upper, p_new_range_position) END,
            generation = c.generation + (random() < 0.01)::int,
            stored_at = clock_timestamp()
        WHERE c.ctid = v_stored.place;
        IF v_stored.shadow_position IS NULL THEN
            PERFORM store_shadow_checkpoint(p_processor_id, p_partition);
        END IF;
        RETURN 1;  -- step 6
    ELSIF p_expected_position IS NULL
          OR (v_stored.last_processed_transaction_id, v_stored.last_processed_position)
             >= (p_expected_transaction_id, p_expected_position) THEN
        RETURN 2;  -- step 7
    END IF;
    RETURN 3;  -- step 8
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_partition int,
    p_new_transaction_id xid8, p_new_position bigint,
    p_expected_transaction_id xid8, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Stores a pair; answers as store_checkpoint.
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
    RETURN store_checkpoint(
        'TransactionOrder', p_processor_id, p_partition, p_new_transaction_id, p_new_position, NULL, NULL, NULL,
        p_expected_transaction_id, p_expected_position, NULL, NULL, NULL, p_epoch, p_owner_token);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_checkpoint(
    p_processor_id text, p_position bigint, p_expected_position bigint, p_transaction_id xid8
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The article's form, for scripts written against it: 4 wherever a claim exists, and counted. It cannot name the
-- expected pair: it expects any pair that is stored with that position. Use the form with eight arguments.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    IF refuses_unowned_caller(p_processor_id, 0) THEN
        RETURN 4;
    END IF;
    IF p_expected_position IS NOT NULL THEN
        SELECT c.* INTO v_stored FROM processor_checkpoints c
        WHERE c.processor_id = p_processor_id AND c.partition = 0
        FOR UPDATE;
        IF (v_stored.last_processed_transaction_id, v_stored.last_processed_position) = (p_transaction_id, p_position) THEN
            RETURN 0;
        ELSIF v_stored.last_processed_position <> p_expected_position THEN
            RETURN CASE WHEN v_stored.last_processed_position > p_expected_position THEN 2 ELSE 3 END;
        END IF;
    END IF;
    RETURN store_processor_checkpoint(
        p_processor_id, 0, p_transaction_id, p_position,
        CASE WHEN p_expected_position IS NOT NULL THEN coalesce(v_stored.last_processed_transaction_id, '0'::xid8) END,
        p_expected_position, NULL, NULL);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".store_processor_range(
    p_processor_id text, p_partition int,
    p_new_counter bigint, p_new_lower pg_snapshot, p_new_upper pg_snapshot, p_new_position bigint,
    p_expected_counter bigint, p_expected_lower pg_snapshot, p_expected_upper pg_snapshot, p_expected_position bigint,
    p_epoch bigint, p_owner_token uuid
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Stores a snapshot range, with the counter in place of the pair; answers as store_checkpoint.
DECLARE
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
                  HINT = 'Name the counter; an upper snapshot goes with a position inside the range.';
    END IF;
    IF p_new_counter < 1 OR p_new_counter <= p_expected_counter
       OR p_expected_lower IS NOT NULL
          AND (p_new_lower IS NULL OR pg_snapshot_xmax(p_new_lower) < pg_snapshot_xmax(p_expected_lower)) THEN
        RAISE EXCEPTION 'a checkpoint never moves back: new % (%) is not after expected % (%)', p_new_counter, v_new,
            p_expected_counter, v_expected
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rewind_processor_range() is the recorded way back.';
    END IF;
    RETURN store_checkpoint(
        'Snapshot', p_processor_id, p_partition, '0', p_new_counter, p_new_lower, p_new_upper, p_new_position,
        CASE WHEN p_expected_counter IS NOT NULL THEN '0'::xid8 END, p_expected_counter, p_expected_lower,
        p_expected_upper, p_expected_position, p_epoch, p_owner_token);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".settle_processor_checkpoint(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, transaction_id xid8, "position" bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What is stored, for an owner that does not know whether its COMMIT arrived: waits until that transaction is over.
-- 55P03 while it is not: ask again. Call it in a transaction of its own, in READ COMMITTED.
DECLARE
    v_stored processor_checkpoints;
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    IF owned THEN
        -- A first row that is not committed yet is invisible, but its key is taken.
        INSERT INTO processor_checkpoints
            (processor_id, partition, last_processed_transaction_id, last_processed_position)
        VALUES (p_processor_id, p_partition, '0', 0) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM processor_checkpoints c WHERE c.processor_id = p_processor_id AND c.partition = p_partition;
        ELSE
            SELECT c.* INTO v_stored FROM processor_checkpoints c
            WHERE c.processor_id = p_processor_id AND c.partition = p_partition
            FOR UPDATE;
            transaction_id := v_stored.last_processed_transaction_id;
            "position" := v_stored.last_processed_position;
        END IF;
    END IF;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_ranges(
    p_processor_id text, p_lower pg_snapshot, p_upper pg_snapshot, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Right after begin_partitions, in its transaction: all partitions start from this one snapshot range. False: not the owner.
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN false;
    END IF;
    -- Only what begin_partitions has just written: no row of a table has transaction id 0, and no pair is 0:1.
    UPDATE processor_checkpoints c
    SET cursor_kind = 'Snapshot', lower_snapshot = p_lower, upper_snapshot = p_upper, range_position = p_position
    WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'TransactionOrder'
      AND c.last_processed_transaction_id = '0' AND c.last_processed_position = 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM store_shadow_checkpoint(p_processor_id, NULL);
    RETURN true;
END
$function$;
