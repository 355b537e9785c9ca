-- Held messages and dead letters of a processor, counted up to a cap.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {schema}.held_messages AS h
                              WHERE h.processor_id = %(processor_id)s LIMIT %(cap)s + 1) AS h),
       (SELECT count(*) FROM (SELECT 1 FROM {schema}.dead_letters AS d
                              WHERE d.processor_id = %(processor_id)s LIMIT %(cap)s + 1) AS d)
