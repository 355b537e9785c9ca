CREATE OR REPLACE FUNCTION :"schema".draw_snapshot_line(p_processor_id text, p_claim_uid text) RETURNS pg_snapshot
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- Cursor Snapshot: draw the stop line of a change that was asked for, once; any process of the resource may call it, as
-- often as it likes. Answers the line; null: there is none, or somebody else is drawing it now.
--
-- Later snapshots see all that earlier ones see. A reader's window that does not see the mark is older than the mark's
-- commit; a line that sees it is younger. So the line holds every window that was read without knowing of the change.
-- Taken before that commit (by the asking transaction itself) it would not: a window could be opened in between.
BEGIN
    IF NOT EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid) THEN
        RETURN NULL;
    END IF;
    PERFORM 1 FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
    -- A statement of its own: a snapshot taken before the lock might not see the mark that the row has by now.
    UPDATE processor_partitions d SET line_snapshot = pg_current_snapshot()
    WHERE d.processor_id = p_processor_id AND d.line_snapshot IS NULL
      AND d.line_mark <> pg_current_xact_id() AND pg_visible_in_snapshot(d.line_mark, pg_current_snapshot());
    RETURN (SELECT d.line_snapshot FROM processor_partitions d WHERE d.processor_id = p_processor_id);
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END
$function$;
