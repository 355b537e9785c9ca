-- Write down what a person decided, where no function of the schema does.
INSERT INTO {schema}.recorded_acts (act, processor_id, reason, decided_by)
VALUES (%(act)s, %(processor_id)s, %(reason)s, %(decided_by)s)
