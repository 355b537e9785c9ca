-- Finds the messages of a batch at which a target's statement fails.

CREATE OR REPLACE FUNCTION :"schema".search_batch(
    p_name text, p_prepare text, p_transaction_ids xid8[], p_positions bigint[], p_keys int[], p_waiting int[], p_at int,
    p_failing_before int, p_block int, p_most int, p_seconds double precision,
    OUT at int, OUT failing_before int, OUT block int, OUT kept int, OUT failed int[], OUT states text[], OUT messages text[],
    OUT hints text[], OUT committing boolean[]
)
LANGUAGE plpgsql
-- To plan each part anew takes ten times what the part does. The user's statement is planned for a few messages.
SET plan_cache_mode = force_generic_plan
AS $function$
-- Finds the messages of a batch at which a statement fails, and runs it over the others, with the caller's rights. Parts are
-- tried in order, each in a subtransaction. One that fails is halved until the message that fails is alone; then parts are
-- half as large, and twice as large after two in a row that get through (outbox_core.processor.isolation: a quarter, since its parts cost more).
-- A statement that takes message by message fails at the one that it read last, and the server counts what was read of an index, also
-- for parts that were undone: then those before that one are handled and it is tried alone, as it is with handlers that begin messages
-- one by one. A statement that reads all before it does anything has read all, which tells nothing.
-- p_name, p_prepare: the statement, as PREPARE name (xid8[], bigint[]): it is run over the messages with these pairs. With the name
-- outbox_near also, where the transaction ids are null, over all messages between the two positions.
-- p_keys: of all messages a number that stands for the key, where later ones of a key wait behind one that failed (p_waiting: those that wait already); else null.
-- p_at: so many messages were tried. p_failing_before: among those up to this number one fails; null: not known. p_block: most messages at
-- once. It ends after p_most parts that got through; or p_seconds, when a message was tried. The answer continues the arguments, and
-- names each message that failed, by its number from 1, and its error; committing: a constraint that waits for the commit.
-- What is no message's fault (a lost connection, a deadlock, no disk, a timeout, a prepared statement that is out of date) is raised.
DECLARE
    v_count int := cardinality(p_positions);
    v_until timestamptz := clock_timestamp() + make_interval(secs => p_seconds);
    v_waiting int[] := coalesce(p_waiting, '{}');
    v_size int;
    v_failed_size int;
    v_row int := 0;
    v_ids xid8[];
    v_positions bigint[];
    v_all boolean;  -- none of the part waits
    v_through boolean;
    v_committing boolean;
    v_state text;
    v_message text;
    v_hint text;
    v_index oid := CASE WHEN p_name = 'outbox_near' THEN to_regclass(format('%I.messages_pkey', :'schema')) END;
    v_read bigint;
    v_last boolean := false;  -- the one that fails is probably the last up to `failing_before`
    v_trusted boolean := true;
BEGIN
    at := p_at;
    failing_before := p_failing_before;
    block := p_block;
    kept := 0;
    failed := '{}';
    states := '{}';
    messages := '{}';
    hints := '{}';
    committing := '{}';
    -- A plan is used for some seconds: a table may have been empty when it was made.
    IF NOT EXISTS (SELECT 1 FROM pg_prepared_statements s WHERE s.name = p_name AND s.statement = p_prepare
                   AND s.prepare_time > clock_timestamp() - interval '10 s') THEN
        IF EXISTS (SELECT 1 FROM pg_prepared_statements s WHERE s.name = p_name) THEN
            EXECUTE format('DEALLOCATE %I', p_name);
        END IF;
        EXECUTE p_prepare;
    END IF;
    WHILE at < v_count AND kept < p_most AND (at = p_at OR clock_timestamp() < v_until) LOOP
        v_size := CASE WHEN failing_before IS NULL THEN least(block, v_count - at)
                       ELSE greatest(1, CASE WHEN v_last THEN failing_before - at - 1 ELSE (failing_before - at) / 2 END) END;
        v_all := v_waiting = '{}';
        IF NOT v_all THEN
            v_all := NOT EXISTS (SELECT 1 FROM unnest(v_waiting) AS n WHERE n BETWEEN at + 1 AND at + v_size);
        END IF;
        IF p_name = 'outbox_near' AND v_all AND p_positions[at + v_size] - p_positions[at + 1] = v_size - 1 THEN
            -- No other message has a position between them.
            v_ids := NULL;
            v_positions := ARRAY[p_positions[at + 1], p_positions[at + v_size]];
        ELSIF v_all THEN
            v_ids := p_transaction_ids[at + 1:at + v_size];
            v_positions := p_positions[at + 1:at + v_size];
        ELSE
            SELECT coalesce(array_agg(p_transaction_ids[n]), '{}'), coalesce(array_agg(p_positions[n]), '{}')
            INTO v_ids, v_positions FROM generate_series(at + 1, at + v_size) AS n WHERE n <> ALL (v_waiting);
        END IF;
        v_through := true;
        IF cardinality(v_positions) > 0 THEN
            v_committing := false;
            -- Only of parts without a gap each row that is read is a message.
            v_read := CASE WHEN v_ids IS NULL THEN pg_stat_get_xact_tuples_fetched(v_index) END;
            BEGIN
                EXECUTE format('EXECUTE %I (%L, %L)', p_name, v_ids, v_positions);
                v_committing := true;
                BEGIN
                    -- Undone again, so that constraints that wait for the commit go on waiting.
                    SET CONSTRAINTS ALL IMMEDIATE;
                    RAISE EXCEPTION USING ERRCODE = 'OBX00';
                EXCEPTION WHEN SQLSTATE 'OBX00' THEN
                    NULL;
                END;
                kept := kept + 1;
            EXCEPTION WHEN OTHERS THEN
                IF left(SQLSTATE, 2) IN ('08', '0A', '25', '26', '40', '53', '55', '57', '58', 'XX') THEN
                    RAISE;
                END IF;
                GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT;
                v_read := pg_stat_get_xact_tuples_fetched(v_index) - v_read;
                v_through := false;
            END;
        END IF;
        IF v_through THEN
            at := at + v_size;
            IF failing_before IS NULL AND v_size = block THEN
                v_row := (v_row + 1) % 2;
                IF v_row = 0 THEN
                    block := block * 2;
                END IF;
            ELSIF at >= failing_before THEN
                failing_before := NULL;
                v_trusted := v_trusted AND NOT v_last;
                v_last := false;
            END IF;
            CONTINUE;
        END IF;
        IF failing_before IS NULL THEN
            v_failed_size := v_size;
        END IF;
        IF v_size > 1 THEN
            v_trusted := v_trusted AND NOT v_last;
            v_last := v_trusted AND coalesce(v_read BETWEEN 1 AND v_size - 1, false);
            failing_before := at + CASE WHEN v_last THEN v_read ELSE v_size END;
            CONTINUE;
        END IF;
        at := at + 1;
        failing_before := NULL;
        v_last := false;
        v_row := 0;
        block := greatest(1, coalesce(v_failed_size, block) / 2);
        failed := failed || at;
        states := states || v_state;
        messages := messages || v_message;
        hints := hints || v_hint;
        committing := committing || v_committing;
        IF p_keys IS NOT NULL THEN
            SELECT v_waiting || coalesce(array_agg(n), '{}') INTO v_waiting
            FROM unnest(array_positions(p_keys, p_keys[at])) AS n WHERE n > at;
        END IF;
    END LOOP;
END
$function$;
