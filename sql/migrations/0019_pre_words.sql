-- What a processor's processes say of themselves, and which table they read: for a person who asks the database.

CREATE TABLE :"schema".processor_words (
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

CREATE TABLE :"schema".processor_mappings (
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

CREATE OR REPLACE FUNCTION :"schema".say_word(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_words jsonb, p_lease interval,
    p_ended boolean DEFAULT false
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What a process says of itself, for a person who asks the database: with its heartbeat, and when it ends. Only a process
-- of the claim's resource is heard. Its word replaces those of processes that ended or are silent. Null: nothing to say.
BEGIN
    IF p_words IS NULL OR p_words = '[]' THEN
        RETURN false;
    END IF;
    INSERT INTO processor_words AS w (processor_id, token, pod, words, heard_until, ended)
    SELECT p_processor_id, p_token, p_pod, p_words, clock_timestamp() + p_lease, p_ended
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE
    SET pod = p_pod, words = p_words, said_at = clock_timestamp(), heard_until = clock_timestamp() + p_lease,
        ended = p_ended;
    IF NOT FOUND OR p_ended THEN
        RETURN FOUND;
    END IF;
    DELETE FROM processor_words w
    USING (SELECT g.token FROM processor_words g
           WHERE g.processor_id = p_processor_id AND g.token <> p_token
             AND (g.ended OR g.heard_until < clock_timestamp())
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE w.processor_id = p_processor_id AND w.token = gone.token;
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".note_mapping(
    p_processor_id text, p_claim_uid text, p_table_schema text, p_table_name text, p_columns jsonb,
    p_publications text[], p_message_types text[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Which table the claim's holder reads, under which columns and filters: for a person who counts or deletes messages.
-- Nothing is written where it is written down already. p_table_name null: `messages` of this schema.
BEGIN
    INSERT INTO processor_mappings AS m
        (processor_id, table_schema, table_name, columns, publications, message_types)
    SELECT p_processor_id, p_table_schema, p_table_name, p_columns, p_publications, p_message_types
    FROM processor_claims c
    WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid
      AND NOT EXISTS (
          SELECT 1 FROM processor_mappings k
          WHERE k.processor_id = p_processor_id
            AND (k.table_schema, k.table_name, k.columns, k.publications, k.message_types)
                IS NOT DISTINCT FROM (p_table_schema, p_table_name, p_columns, p_publications, p_message_types))
    ON CONFLICT (processor_id) DO UPDATE
    SET table_schema = p_table_schema, table_name = p_table_name, columns = p_columns,
        publications = p_publications, message_types = p_message_types, noted_at = clock_timestamp();
    RETURN FOUND;
END
$function$;

REVOKE EXECUTE ON FUNCTION
    :"schema".say_word(text, text, text, uuid, jsonb, interval, boolean),
    :"schema".note_mapping(text, text, text, text, jsonb, text[], text[])
FROM PUBLIC;
