-- How often which code was told, also where the row is gone by now.
SELECT told.code, sum(told.count)::bigint
FROM (SELECT f.code, count(*) FROM {schema}.processor_conflicts AS f WHERE f.processor_id = %(processor_id)s GROUP BY f.code
      UNION ALL
      SELECT p.code, p.count FROM {schema}.pruned_conflicts AS p WHERE p.processor_id = %(processor_id)s) AS told
GROUP BY told.code
ORDER BY told.code
