-- What is committed behind the checkpoint, readable yet or not, counted up to a cap.
SELECT count(*) FILTER (WHERE o.matches),
       count(*),
       coalesce(extract(epoch FROM clock_timestamp() - min(o.scheduled) FILTER (WHERE o.matches)), 0)::float8
FROM ({rows}) AS o
