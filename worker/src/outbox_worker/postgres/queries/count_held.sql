-- Messages that the checkpoint has passed and that are not handled yet.
SELECT count(*)
FROM {schema}.held_messages AS m
WHERE m.processor_id = %(processor_id)s
