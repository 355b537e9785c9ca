-- Which other database the processor reads; no row: this one.
SELECT s.source, s.described
FROM {schema}.processor_sources AS s
WHERE s.processor_id = %(processor_id)s
