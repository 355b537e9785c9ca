CREATE OR REPLACE FUNCTION :"schema".note_mapping(
    p_processor_id text, p_claim_uid text, p_table_schema text, p_table_name text, p_columns jsonb,
    p_publications text[], p_message_types text[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which table the claim's holder reads, under which columns and filters: for a person who counts or deletes messages.
-- Nothing is written where it is written down already. p_table_name null: `messages` of this schema.
BEGIN
    INSERT INTO processor_mappings AS m
        (processor_id, table_schema, table_name, columns, publications, message_types)
    SELECT p_processor_id, p_table_schema, p_table_name, p_columns, p_publications, p_message_types
    FROM processor_claims c
    WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
      AND NOT EXISTS (
          SELECT 1 FROM processor_mappings k
          WHERE k.processor_id = p_processor_id
            AND (k.table_schema, k.table_name, k.columns, k.publications, k.message_types)
                IS NOT DISTINCT FROM (p_table_schema, p_table_name, p_columns, p_publications, p_message_types))
    ON CONFLICT (processor_id) DO UPDATE
    SET table_schema = p_table_schema, table_name = p_table_name, columns = p_columns,
        publications = p_publications, message_types = p_message_types, noted_at = clock_timestamp();
    RETURN FOUND;
END
$function$;
