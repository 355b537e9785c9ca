-- Messages that fail are held, and those that fail again put off, many in one statement: one call for each would take the time
-- of all others.

CREATE OR REPLACE FUNCTION :"schema".hold_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_verdicts jsonb
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- In the transaction of the checkpoint that passes them: keep messages that are not handled now, in reading order. Those
-- with a verdict (t, p: the pair; attempts; class; error; wait in seconds, null: until a person says so; blocks) failed
-- and become what its `action` says (Hold, DeadLetter, Skip); the others wait, behind a message of their key or until
-- `next_attempt_at`. What became due since it was read waits behind what blocks its key here; a dead letter that is written
-- here blocks its key if its verdict says so. -1: not the owner. Else how many are held.
DECLARE
    v_now timestamptz := clock_timestamp();
    v_kept int;
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    INSERT INTO dead_letters (processor_id, partition, key, transaction_id, position, message_id, message_type,
                              publication_id, partition_key, data, metadata, scheduled, attempts, error_class, error,
                              blocks, place)
    SELECT p_processor_id, p_partition, r.key, r.transaction_id, r.position, r.message_id, r.message_type,
           r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled, v.attempts, v.class, v.error, v.blocks,
           nextval('held_order')
    FROM unnest(p_rows) WITH ORDINALITY AS r
    JOIN jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, action text, attempts int, class text, error text,
                                              blocks boolean) ON (v.t, v.p) = (r.transaction_id, r.position)
    WHERE v.action = 'DeadLetter' ORDER BY r.ordinality;
    INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
    SELECT 'Skip', p_processor_id, p_partition, r.transaction_id, r.position,
           format('message %s of type %s, key %s, after %s attempts: %s: %s', r.message_id, r.message_type,
                  r.key, v.attempts, v.class, v.error),
           'delivery.whenExhausted'
    FROM unnest(p_rows) WITH ORDINALITY AS r
    JOIN jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, action text, attempts int, class text, error text)
        ON (v.t, v.p) = (r.transaction_id, r.position)
    WHERE v.action = 'Skip' ORDER BY r.ordinality;
    INSERT INTO held_messages (processor_id, partition, key, place, transaction_id, position, message_id, message_type,
                               publication_id, partition_key, data, metadata, scheduled, blocks, behind, attempts,
                               error_class, error, next_attempt_at)
    SELECT p_processor_id, p_partition, r.key, nextval('held_order'), r.transaction_id, r.position, r.message_id,
           r.message_type, r.publication_id, r.partition_key, r.data, r.metadata, r.scheduled,
           CASE WHEN r.action IS NOT NULL THEN r.blocking ELSE NOT r.delayed END,
           r.action IS NULL AND NOT r.delayed
               AND (r.before OR is_key_blocked(p_processor_id, p_partition, r.key, 9223372036854775807)),
           coalesce(r.failures, 0), r.class, r.failure,
           CASE WHEN r.action IS NOT NULL THEN coalesce(v_now + make_interval(secs => r.wait), 'infinity')
                WHEN r.delayed THEN r.next_attempt_at ELSE v_now END
    FROM (SELECT d.*, coalesce(bool_or(CASE WHEN d.action IS NULL THEN NOT d.delayed
                                            ELSE d.action = 'Hold' AND d.blocking END)
                               OVER (PARTITION BY d.key ORDER BY d.ordinality
                                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS before
          FROM (SELECT u.*, v.action, v.attempts AS failures, v.class, v.error AS failure, v.wait, v.blocks AS blocking,
                       v.action IS NULL AND coalesce(u.next_attempt_at > v_now, false) AS delayed
                FROM unnest(p_rows) WITH ORDINALITY AS u
                LEFT JOIN jsonb_to_recordset(p_verdicts) AS v (
                    t xid8, p bigint, action text, attempts int, class text, error text, wait double precision,
                    blocks boolean) ON (v.t, v.p) = (u.transaction_id, u.position)) AS d) AS r
    WHERE r.action IS NULL OR r.action = 'Hold'
    ORDER BY r.ordinality
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".set_aside(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- hold_messages() as workers of a former version call it: of `p_rows` those with attempts > 0 failed, all with one verdict.
    SELECT hold_messages(p_processor_id, p_partition, p_epoch, p_owner_token, p_rows,
        (SELECT coalesce(jsonb_agg(jsonb_build_object(
            't', r.transaction_id::text, 'p', r.position, 'action', p_action, 'attempts', p_attempts,
            'class', p_error_class, 'error', p_error, 'wait', extract(epoch FROM p_wait), 'blocks', p_blocks)), '[]')
         FROM unnest(p_rows) AS r WHERE r.attempts > 0))
$function$;

CREATE OR REPLACE FUNCTION :"schema".fail_held_messages(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_verdicts jsonb
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Held messages failed again, each with its verdict as in hold_messages(): try it later (Hold; without a wait: when a
-- person says so), keep it as a dead letter, or skip it for good. What waits behind a dead letter of its key goes on
-- waiting, if that blocks. -1: not the owner. Else how many of them are still held, before this.
DECLARE
    v_found int;
    v_keys text[];
BEGIN
    IF NOT holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token) THEN
        RETURN -1;
    END IF;
    UPDATE processor_suspicions s SET held_transaction_ids = '{}', held_positions = '{}'
    WHERE s.processor_id = p_processor_id AND s.partition = p_partition;
    UPDATE held_messages h
    SET attempts = v.attempts, error_class = v.class, error = v.error, blocks = h.blocks OR v.blocks,
        next_attempt_at = coalesce(clock_timestamp() + make_interval(secs => v.wait), 'infinity')
    FROM jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, attempts int, class text, error text,
                                              wait double precision, blocks boolean)
    WHERE h.processor_id = p_processor_id AND h.partition = p_partition
      AND h.transaction_id = v.t AND h.position = v.p;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    WITH gone AS (
        DELETE FROM held_messages h
        USING jsonb_to_recordset(p_verdicts) AS v (t xid8, p bigint, action text, blocks boolean)
        WHERE v.action <> 'Hold' AND h.processor_id = p_processor_id AND h.partition = p_partition
          AND h.transaction_id = v.t AND h.position = v.p
        RETURNING h.*, v.action, v.blocks AS blocking
    ), dead AS (
        INSERT INTO dead_letters (processor_id, partition, key, place, transaction_id, position, message_id,
                                  message_type, publication_id, partition_key, data, metadata, scheduled, attempts,
                                  error_class, error, blocks)
        SELECT p_processor_id, p_partition, g.key, g.place, g.transaction_id, g.position, g.message_id, g.message_type,
               g.publication_id, g.partition_key, g.data, g.metadata, g.scheduled, g.attempts, g.error_class, g.error,
               g.blocking
        FROM gone g WHERE g.action = 'DeadLetter' ORDER BY g.place
    ), skipped AS (
        INSERT INTO recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
        SELECT 'Skip', p_processor_id, p_partition, g.transaction_id, g.position,
               format('message %s of type %s, key %s, after %s attempts: %s: %s', g.message_id, g.message_type, g.key,
                      g.attempts, g.error_class, g.error),
               'delivery.whenExhausted'
        FROM gone g WHERE g.action = 'Skip' ORDER BY g.place
    )
    SELECT array_agg(g.key) INTO v_keys FROM gone g;
    IF v_keys IS NOT NULL THEN
        PERFORM advance_keys(p_processor_id, p_partition, v_keys);
    END IF;
    RETURN v_found;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".fail_held_message(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- fail_held_messages() as workers of a former version call it, for one message.
    SELECT fail_held_messages(p_processor_id, p_partition, p_epoch, p_owner_token, jsonb_build_array(jsonb_build_object(
        't', p_transaction_id::text, 'p', p_position, 'action', p_action, 'attempts', p_attempts,
        'class', p_error_class, 'error', p_error, 'wait', extract(epoch FROM p_wait), 'blocks', p_blocks)))
$function$;

REVOKE EXECUTE ON FUNCTION
    :"schema".hold_messages(text, int, bigint, uuid, :"schema".held_messages[], jsonb),
    :"schema".fail_held_messages(text, int, bigint, uuid, jsonb)
FROM PUBLIC;
