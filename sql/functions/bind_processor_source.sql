CREATE OR REPLACE FUNCTION :"schema".bind_processor_source(
    p_processor_id text, p_claim_uid text, p_source text, p_described text
) RETURNS TABLE (bound boolean, source text, described text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which database does the processor read? Its pairs mean nothing in another one. The claim's holder writes it down when
-- it first asks, or after it was forgotten; everybody else learns what is there. p_source null: this very database,
-- which needs no row. Bound: what is there is what was asked for.
#variable_conflict use_column
BEGIN
    SELECT s.source, s.described INTO source, described FROM processor_sources s WHERE s.processor_id = p_processor_id;
    IF FOUND AND source IS NOT NULL OR p_source IS NULL THEN
        bound := CASE WHEN FOUND THEN coalesce(source = p_source, false) ELSE true END;
    ELSIF FOUND THEN
        UPDATE processor_sources s SET source = p_source, described = p_described, bound_at = clock_timestamp()
        WHERE s.processor_id = p_processor_id AND s.source IS NULL
          AND EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid);
        bound := FOUND;
    ELSE
        INSERT INTO processor_sources AS s (processor_id, source, described)
        SELECT p_processor_id, p_source, p_described FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
          AND NOT EXISTS (SELECT 1 FROM processor_checkpoints k WHERE k.processor_id = p_processor_id)
        ON CONFLICT DO NOTHING;
        bound := FOUND;
    END IF;
    IF NOT bound THEN
        -- Another process of the resource may have written it down at this moment.
        SELECT s.source, s.described INTO source, described FROM processor_sources s
        WHERE s.processor_id = p_processor_id;
        bound := coalesce(source = p_source, false);
    END IF;
    RETURN NEXT;
END
$function$;
