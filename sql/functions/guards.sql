-- Functions of triggers.

CREATE OR REPLACE FUNCTION :"schema".guard_superseded() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor that was replaced stays replaced: there is no lease on it, and its claim stays with the processor that
-- replaced it, also where a resource takes claims by force. It fires only where a lease or claim changes hands.
DECLARE
    v_by text;
BEGIN
    SELECT r.processor_id INTO v_by FROM processor_rebuilds r
    WHERE r.of_processor_id = OLD.processor_id AND r.swapped_at IS NOT NULL;
    IF NOT FOUND THEN
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    ELSIF TG_OP = 'DELETE' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'processor % was replaced by %', OLD.processor_id, v_by
        USING ERRCODE = 'OB001', HINT = 'It can never run again: delete its resource, or use another processorId.';
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".prune_audit_log() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The audit log keeps its last 10,000 entries: users' decisions are few, a script may make many. Of each kind it keeps also the
-- latest one of each partition: what comes after a rewind or a giving up is decided by it, however long ago it was. An entry
-- that another transaction is deleting is left to it: a batch that skips a message must not make other processors wait.
BEGIN
    DELETE FROM audit_log a
    WHERE a.id IN (
        SELECT o.id FROM audit_log o
        WHERE o.id <= (SELECT k.id FROM audit_log k ORDER BY k.id DESC OFFSET 10000 LIMIT 1)
          AND o.id NOT IN (SELECT max(k.id) FROM audit_log k GROUP BY k.processor_id, k.partition, k.action)
        FOR UPDATE SKIP LOCKED);
    RETURN NULL;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".keep_unique() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- While a message with this key is pending (no consumer has taken it yet), a second one is not stored, with any id: as ON CONFLICT DO
-- NOTHING, also in that it waits for a transaction that is storing the same key. The key of the one that is pending is not locked:
-- the consumer that takes that one deletes the key, and must not wait for a producer. promote_waiting frees a key before it comes here.
DECLARE
    v_kept int;
BEGIN
    EXECUTE format('INSERT INTO %I (unique_key, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING', TG_ARGV[0])
    USING NEW.unique_key, NEW.message_id;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN CASE WHEN v_kept = 1 THEN NEW END;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".forget_emptying() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A batch is done: a transaction with an older snapshot still sees it, so its table is not what may_empty saw before.
BEGIN
    DELETE FROM emptyings e WHERE e.child = TG_TABLE_NAME;
    RETURN NULL;
END
$function$;
