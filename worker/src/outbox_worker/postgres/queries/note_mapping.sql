-- Write down which table the processor reads.
SELECT {schema}.note_mapping(
    %(processor_id)s, %(claim_uid)s, %(table_schema)s, %(table_name)s, %(columns)s::jsonb, %(publications)s::text[],
    %(message_types)s::text[])
