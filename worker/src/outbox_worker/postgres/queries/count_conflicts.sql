-- How often which code was told.
SELECT code, count(*)
FROM {schema}.processor_conflicts
WHERE processor_id = %(processor_id)s
GROUP BY code
ORDER BY code
