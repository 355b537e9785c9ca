CREATE OR REPLACE FUNCTION :"schema".note_rebuild(
    p_processor_id text, p_of text, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (of_processor_id text, swapped_at timestamptz, superseded_by text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The live owner writes down which processor it is to replace, for people to see; a swap that was made is never taken
-- back. Answers what is so, and who replaced that processor, if anybody did.
#variable_conflict use_column
BEGIN
    SELECT r.of_processor_id, r.swapped_at INTO of_processor_id, swapped_at
    FROM processor_rebuilds r WHERE r.processor_id = p_processor_id;
    IF (NOT FOUND OR (swapped_at IS NULL AND of_processor_id <> p_of))
       AND holds_lease(p_processor_id, 0, p_epoch, p_owner_token) THEN
        INSERT INTO processor_rebuilds AS r (processor_id, of_processor_id) VALUES (p_processor_id, p_of)
        ON CONFLICT (processor_id) DO UPDATE SET of_processor_id = excluded.of_processor_id
        WHERE r.swapped_at IS NULL;
        of_processor_id := p_of;
    END IF;
    SELECT r.processor_id INTO superseded_by FROM processor_rebuilds r
    WHERE r.of_processor_id = p_of AND r.swapped_at IS NOT NULL;
    RETURN NEXT;
END
$function$;
