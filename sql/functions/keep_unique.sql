CREATE OR REPLACE FUNCTION :"schema".keep_unique() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- While a message with this key is pending (nobody has taken it yet), a second one is not stored: as ON CONFLICT DO NOTHING, also in
-- that it waits for a transaction that is storing the same key. The same message may move from the delayed ones to the others.
DECLARE
    v_kept int;
BEGIN
    EXECUTE format('INSERT INTO %I AS k (unique_key, message_id) VALUES ($1, $2)
                    ON CONFLICT (unique_key) DO UPDATE SET message_id = k.message_id
                    WHERE k.message_id = EXCLUDED.message_id', TG_ARGV[0])
    USING NEW.unique_key, NEW.message_id;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN CASE WHEN v_kept = 1 THEN NEW END;
END
$function$;
