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
