-- What waits is found by what is asked for, however much else waits.

-- Of messages that are due at one and the same moment the first ones.
DROP INDEX :"schema".held_messages_due;
CREATE INDEX held_messages_due ON :"schema".held_messages (processor_id, partition, next_attempt_at, place) WHERE NOT behind;

-- The copy of a message that may be pruned.
CREATE INDEX IF NOT EXISTS dead_letters_by_message ON :"schema".dead_letters (transaction_id, position);

-- Of a queue's delayed messages those that failed.
CREATE FUNCTION :"schema".index_failed() RETURNS void
LANGUAGE plpgsql SET search_path = :"schema", pg_temp
AS $function$
DECLARE
    v_queue text;
BEGIN
    FOR v_queue IN SELECT q.queue FROM queues q LOOP
        EXECUTE format('CREATE INDEX ON %I (deliver_after) WHERE last_error IS NOT NULL', 'queue_' || v_queue || '_delayed');
    END LOOP;
END
$function$;
SELECT :"schema".index_failed();
DROP FUNCTION :"schema".index_failed();
