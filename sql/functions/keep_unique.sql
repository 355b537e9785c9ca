CREATE OR REPLACE FUNCTION :"schema".keep_unique() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- While a message with this key is pending (nobody has taken it yet), a second one is not stored, whatever its id: as ON CONFLICT DO
-- NOTHING, also in that it waits for a transaction that is storing the same key. The key of the one that is pending is not locked:
-- whoever takes that one deletes the key, and must not wait for a producer. promote_delayed frees a key before it comes here.
DECLARE
    v_kept int;
BEGIN
    EXECUTE format('INSERT INTO %I (unique_key, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING', TG_ARGV[0])
    USING NEW.unique_key, NEW.message_id;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN CASE WHEN v_kept = 1 THEN NEW END;
END
$function$;
