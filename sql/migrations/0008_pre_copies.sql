-- Copied, restored and promoted databases: the timeline is part of the identity, and ids that a restore brought along can be rebased.

ALTER TABLE :"schema".database_identity ADD COLUMN timeline_id int, ADD COLUMN repair_begun_at timestamptz,
    ADD COLUMN rebased int NOT NULL DEFAULT 0;

COMMENT ON COLUMN :"schema".database_identity.timeline_id IS
    'Of the server, when identity or timeline was last confirmed: a standby that was promoted, and a base backup recovered elsewhere, differ only in it.';
COMMENT ON COLUMN :"schema".database_identity.repair_begun_at IS
    'While a repair is unfinished: nothing runs.';

COMMENT ON COLUMN :"schema".database_identity.rebased IS
    'How often a repair has rebased the transaction ids: checkpoints that another database keeps are of the ids before.';

CREATE TABLE :"schema".repairs (
    id               bigint      GENERATED ALWAYS AS IDENTITY,
    restored_until   xid8        NOT NULL,
    below            xid8        NOT NULL,
    planned_by       xid8        NOT NULL,
    tables           text[][]    NOT NULL,
    reason           text        NOT NULL,
    decided_by       text        NOT NULL,
    begun_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at      timestamptz,
    CONSTRAINT repairs_pkey PRIMARY KEY (id)
);
CREATE UNIQUE INDEX repairs_one_at_a_time ON :"schema".repairs ((finished_at IS NULL)) WHERE finished_at IS NULL;

COMMENT ON TABLE :"schema".repairs IS
    'Rebased transaction ids: what a transaction up to restored_until wrote came with the restore; every new id is below `below`; rows that planned_by or a later transaction wrote there are done.';

CREATE TABLE :"schema".repair_ids (
    repair_id          bigint  NOT NULL,
    written_here       boolean NOT NULL,
    old_transaction_id xid8    NOT NULL,
    new_transaction_id xid8    NOT NULL,
    CONSTRAINT repair_ids_pkey PRIMARY KEY (repair_id, written_here, old_transaction_id),
    CONSTRAINT repair_ids_repair_fkey FOREIGN KEY (repair_id) REFERENCES :"schema".repairs (id)
);

COMMENT ON TABLE :"schema".repair_ids IS
    'Which id becomes which, while a repair is unfinished: in the same order, restored ones first.';

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
-- The server was promoted, or recovered to a point in time. A resource that owned this processor before goes on: it was pointed here, and
-- says for everybody that this is the same outbox. True: the database's identity names the current timeline now.
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
    INSERT INTO recorded_acts (act, processor_id, reason, decided_by)
    VALUES ('AdoptTimeline', p_processor_id, format('timeline %s -> %s', v_before, v_now),
            format('resource %s/%s/%s', p_cluster, p_namespace, p_name));
    RETURN true;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".is_behind_its_rows() RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a message or a checkpoint stored here whose transaction id is above that of the transaction that wrote the row? Then it came from a
-- server that was further on, and what is written here since sorts before it. True for good, also once this server's
-- counter has passed it; until `outbox repair`. Scans the outbox once.
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
        EXECUTE format('SELECT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE (%s)::text::numeric > $1 - age(c.xmin))', v_value)
        INTO v_found USING v_now;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN EXISTS (SELECT 1 FROM messages o WHERE o.transaction_id::text::numeric > v_now - age(o.xmin));
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
    INSERT INTO recorded_acts (act, reason, decided_by)
    VALUES ('ConfirmIdentity', p_action, coalesce(p_decided_by, session_user));
    RETURN v_uuid;
END
$function$;

UPDATE :"schema".database_identity SET timeline_id = :"schema".current_timeline();

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
-- Producers compute it for the index that readers of partitions need.
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text) TO PUBLIC;
