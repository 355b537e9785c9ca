CREATE OR REPLACE FUNCTION :"schema".guard_superseded() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A processor that was replaced stays so: no lease on it, and its claim stays with the one that replaced it, also where
-- somebody takes claims by force. Costs nothing on a heartbeat or a store: it fires where a lease or claim changes hands.
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
