-- Which processor replaced this one.
SELECT r.processor_id
FROM {schema}.processor_rebuilds AS r
WHERE r.of_processor_id = %(processor_id)s AND r.swapped_at IS NOT NULL
