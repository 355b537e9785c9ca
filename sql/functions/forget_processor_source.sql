CREATE OR REPLACE FUNCTION :"schema".forget_processor_source(p_processor_id text, p_reason text, p_decided_by text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The source moved, or is a copy that a person takes for the original: whoever claims next writes down what it reads.
-- 1 done; 0 nothing was written down; 4 refused: an owner is live.
DECLARE
    v_described text;
BEGIN
    PERFORM 1 FROM processor_leases l WHERE l.processor_id = p_processor_id ORDER BY l.partition FOR UPDATE;
    IF EXISTS (SELECT 1 FROM processor_leases l
               WHERE l.processor_id = p_processor_id AND l.expires_at > clock_timestamp()) THEN
        RETURN 4;
    END IF;
    UPDATE processor_sources s SET source = NULL WHERE s.processor_id = p_processor_id AND s.source IS NOT NULL
    RETURNING s.described INTO v_described;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    INSERT INTO recorded_acts (act, processor_id, reason, decided_by)
    VALUES ('ForgetSource', p_processor_id, format('%s (it read %s)', p_reason, v_described), p_decided_by);
    RETURN 1;
END
$function$;
