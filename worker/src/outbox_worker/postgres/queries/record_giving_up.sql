-- Write down that a person gives up the message at which a processor stands: the worker makes it a dead letter.
INSERT INTO {schema}.recorded_acts (act, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
VALUES ('GiveUp', %(processor_id)s, %(partition)s, %(transaction_id)s::xid8, %(position)s, %(reason)s, %(decided_by)s)
