CREATE OR REPLACE FUNCTION :"schema".try_parts(p_prepare text, p_parts text[]) RETURNS int
LANGUAGE plpgsql
AS $function$
-- Runs a statement over one part of a batch after the other, with the caller's rights, each in a subtransaction, until one part
-- is refused; says how many were not. p_prepare: the statement, as PREPARE outbox_part. p_parts: the arguments of each EXECUTE.
-- What is no message's fault (a lost connection, a deadlock, no disk, a timeout) is raised to the caller.
DECLARE
    v_through int := 0;
    v_part text;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_prepared_statements s WHERE s.name = 'outbox_part' AND s.statement = p_prepare) THEN
        IF EXISTS (SELECT 1 FROM pg_prepared_statements s WHERE s.name = 'outbox_part') THEN
            EXECUTE 'DEALLOCATE outbox_part';
        END IF;
        EXECUTE p_prepare;
    END IF;
    FOREACH v_part IN ARRAY p_parts LOOP
        BEGIN
            EXECUTE 'EXECUTE outbox_part (' || v_part || ')';
            BEGIN
                -- Undone again, so that constraints that wait for the commit go on waiting.
                SET CONSTRAINTS ALL IMMEDIATE;
                RAISE EXCEPTION USING ERRCODE = 'OBX00';
            EXCEPTION WHEN SQLSTATE 'OBX00' THEN
                NULL;
            END;
        EXCEPTION WHEN OTHERS THEN
            IF left(SQLSTATE, 2) IN ('08', '25', '40', '53', '55', '57', '58', 'XX') THEN
                RAISE;
            END IF;
            RETURN v_through;
        END;
        v_through := v_through + 1;
    END LOOP;
    RETURN v_through;
END
$function$;
