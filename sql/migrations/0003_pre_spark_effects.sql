-- What the Spark engine must remember in the transaction of the checkpoint, because Spark's own directory is only a cache.

CREATE TABLE :"schema".spark_queries (
    processor_id   text        NOT NULL,
    partition      int         NOT NULL DEFAULT 0,
    decisions      bigint      NOT NULL,
    transaction_id xid8        NOT NULL,
    position       bigint      NOT NULL,
    begun_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT spark_queries_pkey PRIMARY KEY (processor_id, partition)
);

COMMENT ON TABLE :"schema".spark_queries IS
    'Where the current query checkpoint directory of a processor was begun, and after which recorded act.';

CREATE TABLE :"schema".spark_staging (
    table_name   text        NOT NULL,
    processor_id text        NOT NULL,
    epoch        bigint      NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT spark_staging_pkey PRIMARY KEY (table_name)
);
CREATE INDEX spark_staging_by_processor ON :"schema".spark_staging (processor_id, epoch);

COMMENT ON TABLE :"schema".spark_staging IS
    'Staging tables of Spark processors, one per owner''s epoch and list of columns; a later epoch drops them.';

CREATE TABLE :"schema".spark_files (
    id           bigint      GENERATED ALWAYS AS IDENTITY,
    processor_id text        NOT NULL,
    epoch        bigint      NOT NULL,
    hidden_path  text        NOT NULL,
    final_path   text        NOT NULL,
    row_count    bigint      NOT NULL,
    listed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT spark_files_pkey PRIMARY KEY (id),
    CONSTRAINT spark_files_are_named_once UNIQUE (final_path)
);
CREATE INDEX spark_files_by_processor ON :"schema".spark_files (processor_id, id);

COMMENT ON TABLE :"schema".spark_files IS
    'Manifest: files whose rows the stored checkpoint counts as written, until they are moved to their names for readers.';
