-- Which database and which run of the server this is, and whether its ids are behind its rows.

CREATE OR REPLACE FUNCTION :"schema".current_timeline() RETURNS int
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The server's timeline: each promotion of a standby and each recovery to a point in time begins a new one. The control file
-- learns of it only with the next checkpoint; some hosted servers show nothing else.
BEGIN
    IF NOT pg_is_in_recovery() THEN
        RETURN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int;
    END IF;
    RETURN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c);
EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
    RETURN (SELECT c.timeline_id FROM pg_control_checkpoint() AS c);
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".adopt_timeline(
    p_processor_id text, p_cluster text, p_namespace text, p_name text, p_uid text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The server was promoted, or recovered to a point in time. A resource that owned this processor before goes on: a user pointed it here,
-- and that says for all resources that this is the same outbox. True: the database's identity names the current timeline now.
DECLARE
    v_before int;
    v_now int := current_timeline();
BEGIN
    SELECT i.timeline_id INTO v_before FROM database_identity i FOR UPDATE;
    IF v_before = v_now THEN
        RETURN true;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id
                   AND (c.uid = p_uid OR (c.cluster, c.namespace, c.name) = (p_cluster, p_namespace, p_name))) THEN
        RETURN false;
    END IF;
    UPDATE database_identity SET timeline_id = v_now;
    INSERT INTO audit_log (action, processor_id, reason, decided_by)
    VALUES ('AdoptTimeline', p_processor_id, format('timeline %s -> %s', v_before, v_now),
            format('resource %s/%s/%s', p_cluster, p_namespace, p_name));
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".confirm_identity(p_action text, p_decided_by text DEFAULT session_user)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- After a copy or a move. 'keep': this is the same outbox in a new place (moved, restored, upgraded); the old place is no
-- longer used. 'renew': this is a copy and the original lives on; claims and leases that came along are dropped.
DECLARE
    v_uuid uuid;
BEGIN
    IF p_action IS NULL OR p_action NOT IN ('keep', 'renew') THEN
        RAISE EXCEPTION 'confirm_identity: % is neither keep nor renew', p_action
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'keep: the database moved. renew: it is a copy, the original lives on.';
    END IF;
    IF is_behind_its_rows() THEN
        RAISE EXCEPTION 'confirm_identity: transaction ids stored here are above those of this server: run `outbox repair` first'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Messages stored since the restore would sort before the restored ones, and be passed over.';
    END IF;
    IF p_action = 'renew' THEN
        -- The claims first, as in claim_processor: a lease that is being acquired is waited for, and ended.
        PERFORM 1 FROM processor_claims c ORDER BY c.processor_id FOR UPDATE;
        PERFORM end_leases(c.processor_id, NULL) FROM processor_claims c;
        DELETE FROM processor_claims;
    END IF;
    UPDATE database_identity i
    SET system_identifier = s.system_identifier,
        database_oid = d.oid,
        timeline_id = current_timeline(),
        database_uuid = CASE p_action WHEN 'renew' THEN gen_random_uuid() ELSE i.database_uuid END,
        confirmed_at = clock_timestamp()
    FROM pg_control_system() AS s, pg_database AS d
    WHERE d.datname = current_database()
    RETURNING i.database_uuid INTO v_uuid;
    INSERT INTO audit_log (action, reason, decided_by)
    VALUES ('ConfirmIdentity', p_action, coalesce(p_decided_by, session_user));
    RETURN v_uuid;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_behind_its_rows() RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a message or a checkpoint stored here whose transaction id is above that of the transaction that wrote the row? Then it came from a
-- server that was further on, and what is written here since sorts before it. True for good, also once this server's
-- counter has passed it; until `outbox repair`. Checkpoints of another database's messages say nothing. Scans the outbox once.
DECLARE
    v_now bigint := pg_current_xact_id()::text::bigint;  -- assigned first: age() counts from it
    v_value text;
    v_found boolean;
BEGIN
    -- A snapshot's beginning is at most the transaction that takes it; its end may be beyond.
    FOR v_value IN
        SELECT CASE a.atttypid WHEN 'xid8'::regtype THEN format('c.%I', a.attname)
                               ELSE format('pg_snapshot_xmin(c.%I)', a.attname) END
        FROM pg_attribute a
        WHERE a.attrelid = 'processor_checkpoints'::regclass AND a.attnum > 0 AND NOT a.attisdropped
          AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype)
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE (%s)::text::numeric > $1 - age(c.xmin) '
                       'AND NOT EXISTS (SELECT 1 FROM processor_sources s WHERE s.processor_id = c.processor_id))', v_value)
        INTO v_found USING v_now;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN EXISTS (SELECT 1 FROM messages o WHERE o.transaction_id::text::numeric > v_now - age(o.xmin));
END
$function$;

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
