-- Messages that the checkpoint has passed and that are not handled: held ones, and dead letters that block their keys.
SELECT (SELECT count(*) FROM {schema}.held_messages AS m WHERE m.processor_id = %(processor_id)s),
       (SELECT count(*) FROM {schema}.dead_letters AS m WHERE m.processor_id = %(processor_id)s AND m.blocks)
