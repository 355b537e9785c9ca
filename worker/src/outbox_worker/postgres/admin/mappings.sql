-- name: list_mappings
-- Which table each processor reads, as its owner last said.
SELECT processor_id, table_schema, table_name, columns, publications, message_types
FROM {schema}.processor_mappings
