CREATE OR REPLACE FUNCTION :"schema".server_run() RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Which run of the server this is: another answer than before means that it recovered from a crash in between, also one
-- of a single backend. A transaction id that was handed out before may then be handed out again, and a commit that was
-- not waited for may be undone. A clean stop loses nothing, and changes nothing here. A row that came with a dump or a
-- copy of the database names another database, or another table, and counts for nothing.
DECLARE
    v_place text := (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()) || '/'
                    || 'server_runs'::regclass::oid;
    v_run uuid;
BEGIN
    SELECT r.id INTO v_run FROM server_runs r WHERE r.place = v_place;
    WHILE v_run IS NULL LOOP
        INSERT INTO server_runs AS r (place) VALUES (v_place)
        ON CONFLICT (one) DO UPDATE SET id = excluded.id, place = excluded.place WHERE r.place <> excluded.place
        RETURNING r.id INTO v_run;
        IF v_run IS NULL THEN
            SELECT r.id INTO v_run FROM server_runs r WHERE r.place = v_place;
        END IF;
    END LOOP;
    RETURN v_run;
END
$function$;
