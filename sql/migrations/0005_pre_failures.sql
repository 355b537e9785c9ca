-- What becomes of messages that fail, or whose time has not come: held ones wait and are tried again, dead ones wait for a person.

CREATE TABLE :"schema".held_messages (
    processor_id    text        NOT NULL,
    partition       int         NOT NULL DEFAULT 0,
    key             text,
    transaction_id  xid8        NOT NULL,
    position        bigint      NOT NULL,
    message_id      text        NOT NULL,
    attempts        int         NOT NULL DEFAULT 0,
    error_class     text,
    error           text,
    held_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT held_messages_pkey PRIMARY KEY (processor_id, partition, transaction_id, position)
) WITH (fillfactor = 50);

COMMENT ON TABLE :"schema".held_messages IS
    'Messages that the checkpoint has passed and that are not handled yet: one that fails, those behind it with its key, and delayed ones.';

CREATE TABLE :"schema".dead_letters (
    id              bigint      GENERATED ALWAYS AS IDENTITY,
    processor_id    text        NOT NULL,
    partition       int         NOT NULL DEFAULT 0,
    key             text,
    transaction_id  xid8        NOT NULL,
    position        bigint      NOT NULL,
    message_id      text        NOT NULL,
    message_type    text        NOT NULL,
    publication_id  text        NOT NULL DEFAULT 'default',
    partition_key   text,
    data            jsonb       NOT NULL,
    metadata        jsonb,
    scheduled       timestamptz,
    attempts        int         NOT NULL,
    error_class     text        NOT NULL,
    error           text        NOT NULL,
    died_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT dead_letters_pkey PRIMARY KEY (id)
);

COMMENT ON TABLE :"schema".dead_letters IS
    'Messages whose attempts ran out, with error and attempts, until a person has them handled again or drops them.';

CREATE INDEX dead_letters_by_key ON :"schema".dead_letters (processor_id, key, id);
