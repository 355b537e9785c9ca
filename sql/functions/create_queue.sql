CREATE OR REPLACE FUNCTION :"schema".create_queue(p_queue text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Makes the table queue_NAME; false: it was there. The high bits of a position say in which of four segments a
-- message lies: moving the sequence on moves producers to the next one, and costs them nothing.
DECLARE
    v_schema text := current_schema();
    v_table text := 'queue_' || p_queue;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox queue ' || v_schema || ' ' || p_queue));
    INSERT INTO queues (queue) VALUES (p_queue) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE SEQUENCE %I.%I', v_schema, v_table || '_position');
    EXECUTE format($ddl$
        CREATE TABLE %1$I.%2$I (
            position       bigint      NOT NULL DEFAULT nextval(%3$L),
            transaction_id xid8        NOT NULL DEFAULT pg_current_xact_id(),
            publication_id text        NOT NULL DEFAULT 'default',
            partition_key  text,
            message_id     text        NOT NULL DEFAULT gen_random_uuid()::text,
            message_type   text        NOT NULL,
            data           jsonb       NOT NULL,
            metadata       jsonb,
            scheduled      timestamptz NOT NULL DEFAULT clock_timestamp(),
            priority       smallint    NOT NULL DEFAULT 5 CHECK (priority BETWEEN 0 AND 9),
            deliver_after  timestamptz,
            unique_key     text        CHECK (octet_length(unique_key) <= 1024),
            attempts       int         NOT NULL DEFAULT 0,
            last_error     text
        ) PARTITION BY LIST ((CASE WHEN deliver_after IS NULL THEN (position >> 40) & 3 ELSE -1 END))
        $ddl$, v_schema, v_table, format('%I.%I', v_schema, v_table || '_position'));
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)',
                       v_schema, v_table || '_' || n, v_table, n);
        EXECUTE format('CREATE INDEX ON %I.%I (priority, transaction_id, position)', v_schema, v_table || '_' || n);
    END LOOP;
    EXECUTE format('CREATE TABLE %I.%I PARTITION OF %1$I.%3$I FOR VALUES IN (-1)',
                   v_schema, v_table || '_delayed', v_table);
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after)', v_schema, v_table || '_delayed');
    -- Those that never failed are found however many are due again.
    EXECUTE format('CREATE INDEX ON %I.%I (deliver_after) WHERE last_error IS NULL', v_schema, v_table || '_delayed');
    EXECUTE format('CREATE TABLE %I.%I (unique_key text NOT NULL PRIMARY KEY, message_id text NOT NULL)',
                   v_schema, v_table || '_keys');
    EXECUTE format('CREATE TRIGGER unique_while_pending BEFORE INSERT ON %I.%I FOR EACH ROW
                    WHEN (NEW.unique_key IS NOT NULL) EXECUTE FUNCTION %1$I.keep_unique(%3$L)',
                   v_schema, v_table, v_table || '_keys');
    EXECUTE format('COMMENT ON TABLE %I.%I IS %L', v_schema, v_table,
                   'A queue: messages inserted by producers, handled once each by one of the consumers that compete for them.');
    RETURN true;
END
$function$;
