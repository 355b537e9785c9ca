-- What the former migrations 0018 to 0027 added. It is apart from the baseline, so that a database made with the first 17 of them
-- gets it too; a database that stopped in between has some of it already, hence IF NOT EXISTS.

-- What former versions left of partitions that are gone: conflicts that no command could decide, and rows that count as deleted by hand.
UPDATE :"schema".processor_conflicts f
SET resolved_at = clock_timestamp(), resolution = 'PartitionGone', decided_by = 'migration 0018'
FROM :"schema".processor_partitions d
WHERE d.processor_id = f.processor_id AND f.partition NOT BETWEEN 0 AND d.partition_count - 1
  AND f.needs_person AND f.resolved_at IS NULL;

DELETE FROM :"schema".kept_checkpoints k
USING :"schema".processor_partitions d
WHERE d.processor_id = k.processor_id AND k.partition NOT BETWEEN 0 AND d.partition_count - 1;

-- What a processor's processes say of themselves, and which table they read: for a person who asks the database.
CREATE TABLE IF NOT EXISTS :"schema".processor_words (
    processor_id text        NOT NULL,
    token        uuid        NOT NULL,
    pod          text        NOT NULL,
    words        jsonb       NOT NULL,
    said_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    heard_until  timestamptz NOT NULL,
    ended        boolean     NOT NULL DEFAULT false,
    CONSTRAINT processor_words_pkey PRIMARY KEY (processor_id, token)
) WITH (fillfactor = 50);

COMMENT ON TABLE :"schema".processor_words IS
    'The last word of each process: an array of partition, state, reason and message. Past heard_until the process was killed or is out of reach.';

CREATE TABLE IF NOT EXISTS :"schema".processor_mappings (
    processor_id  text        NOT NULL,
    table_schema  text,
    table_name    text,
    columns       jsonb,
    publications  text[]      NOT NULL DEFAULT '{}',
    message_types text[]      NOT NULL DEFAULT '{}',
    noted_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT processor_mappings_pkey PRIMARY KEY (processor_id),
    CONSTRAINT processor_mappings_table_is_whole
        CHECK ((table_name IS NULL) = (table_schema IS NULL) AND (table_name IS NULL) = (columns IS NULL))
);

COMMENT ON TABLE :"schema".processor_mappings IS
    'Which table a processor reads, with its columns and filters, as the claim''s holder last said. No table: messages of this schema.';

-- Crash recovery empties an unlogged table, and a clean restart does not. One row: the random id of this run.
CREATE UNLOGGED TABLE IF NOT EXISTS :"schema".server_runs (
    one boolean NOT NULL PRIMARY KEY DEFAULT true CHECK (one),
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    place text NOT NULL
);

-- Messages that wait and failed before starve no others: the two are taken apart.
CREATE INDEX IF NOT EXISTS competing_retries_untried ON :"schema".competing_retries (processor_id, due_at) WHERE error_class IS NULL;

CREATE FUNCTION :"schema".index_untried() RETURNS void
LANGUAGE plpgsql SET search_path = :"schema", pg_temp
AS $function$
DECLARE
    v_queue text;
BEGIN
    FOR v_queue IN
        SELECT q.queue FROM queues q
        WHERE NOT EXISTS (
            SELECT 1 FROM pg_index i
            WHERE i.indrelid = to_regclass(format('%I', 'queue_' || q.queue || '_delayed'))
              AND pg_get_expr(i.indpred, i.indrelid) = '(last_error IS NULL)')
    LOOP
        EXECUTE format('CREATE INDEX ON %I (deliver_after) WHERE last_error IS NULL', 'queue_' || v_queue || '_delayed');
    END LOOP;
END
$function$;
SELECT :"schema".index_untried();
DROP FUNCTION :"schema".index_untried();

-- A table of mode Competing is emptied only when no snapshot is older than the moment from which nothing in it is needed: pg_dump
-- takes its snapshot before its locks.
CREATE TABLE IF NOT EXISTS :"schema".emptyings (
    child   text        NOT NULL,
    mark    text        NOT NULL,
    looks   int         NOT NULL,
    seen_at timestamptz NOT NULL,
    seen_id bigint       NOT NULL,
    CONSTRAINT emptyings_pkey PRIMARY KEY (child)
);

COMMENT ON TABLE :"schema".emptyings IS
    'Tables of mode Competing in which nothing is needed any more, and since when: they are emptied when nobody''s snapshot is older.';

\ir ../functions/guards.sql
CREATE OR REPLACE TRIGGER forget_emptying AFTER DELETE ON :"schema".competing_batches
    FOR EACH ROW EXECUTE FUNCTION :"schema".forget_emptying();

-- A batch says whether its messages failed before: delayed messages are listed too, and handed back they are no retries.
ALTER TABLE :"schema".competing_batches ADD COLUMN failed boolean NOT NULL DEFAULT false;
UPDATE :"schema".competing_batches SET failed = true WHERE positions IS NOT NULL;
