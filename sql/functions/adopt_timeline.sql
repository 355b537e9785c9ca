CREATE OR REPLACE FUNCTION :"schema".adopt_timeline(
    p_processor_id text, p_cluster text, p_namespace text, p_name text, p_uid text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The server was promoted, or recovered to a point in time. A resource that owned this processor before goes on: it was pointed here, and
-- says for everybody that this is the same outbox. True: the database's identity names the current timeline now.
DECLARE
    v_before int;
    v_now int := current_timeline();
BEGIN
    SELECT i.timeline_id INTO v_before FROM database_identity i FOR UPDATE;
    IF v_before = v_now THEN
        RETURN true;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id
                   AND (c.uid = p_uid OR (c.cluster, c.namespace, c.name) = (p_cluster, p_namespace, p_name))) THEN
        RETURN false;
    END IF;
    UPDATE database_identity SET timeline_id = v_now;
    INSERT INTO recorded_acts (act, processor_id, reason, decided_by)
    VALUES ('AdoptTimeline', p_processor_id, format('timeline %s -> %s', v_before, v_now),
            format('resource %s/%s/%s', p_cluster, p_namespace, p_name));
    RETURN true;
END
$function$;
