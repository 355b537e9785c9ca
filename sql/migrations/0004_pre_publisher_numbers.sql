-- A broker that drops what it has by its number: which number the last message before the checkpoint has.
CREATE TABLE IF NOT EXISTS :"schema".publisher_numbers (
    processor_id   text   NOT NULL,
    partition      int    NOT NULL,
    space          uuid   NOT NULL,
    place          text   NOT NULL,
    mapping        text   NOT NULL,
    transaction_id xid8   NOT NULL,
    "position"     bigint NOT NULL,
    last_number    bigint NOT NULL,
    CONSTRAINT publisher_numbers_pkey PRIMARY KEY (processor_id, partition)
) WITH (fillfactor = 50);

COMMENT ON TABLE :"schema".publisher_numbers IS
    'Target rabbitmqStream: the numbers by which the broker drops what it has. Counts only for the checkpoint that it names.';
COMMENT ON COLUMN :"schema".publisher_numbers.space IS
    'Names numbers that were given out in one order; random, so that none is ever used again with other messages.';
COMMENT ON COLUMN :"schema".publisher_numbers.place IS
    'Server, database, timeline and identity: with another one, others may come in the place of messages that were lost.';
COMMENT ON COLUMN :"schema".publisher_numbers.mapping IS
    'Which messages are counted, and where they go, as a checksum.';
