CREATE OR REPLACE FUNCTION :"schema".ask_partitions(
    p_processor_id text, p_claim_uid text, p_generation bigint, p_count int, p_key text, p_asked_by text
) RETURNS TABLE (partition_count int, key text, next_count int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process says into how many partitions its resource wants the processor divided. Another number than there is draws
-- the stop line, in all partitions at once; the number there is takes an unfinished change back. A process that was
-- started from an older text of the resource changes nothing. Answers how the processor is divided; no row: it is not.
--
-- The line is just below this transaction's own id. Whoever reads without seeing the line sees this transaction open:
-- the reading bound keeps such a reader below the line. So nobody has read beyond it, and nobody needs to be waited for.
--
-- Cursor Snapshot has no such order. This transaction's id is the line's mark: whoever reads without seeing the wish has a
-- window that does not see the mark. The line is a snapshot that does, drawn once this is committed: draw_snapshot_line.
#variable_conflict use_column
DECLARE
    v_now processor_partitions;
    v_windows boolean;
BEGIN
    SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    IF v_now.key = p_key AND p_count BETWEEN 1 AND 64
       AND (v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation) THEN
        PERFORM 1 FROM processor_claims c
        WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
        IF FOUND THEN
            SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
            IF v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation THEN
                v_windows := EXISTS (SELECT 1 FROM processor_checkpoints c
                                     WHERE c.processor_id = p_processor_id AND c.cursor_kind = 'Snapshot');
                UPDATE processor_partitions d
                SET asked_uid = p_claim_uid, asked_generation = p_generation, asked_by = p_asked_by,
                    next_count = p_count,
                    asked_at = coalesce(d.asked_at, clock_timestamp()),
                    line_mark = CASE WHEN v_windows THEN coalesce(d.line_mark, pg_current_xact_id()) END,
                    line_transaction_id = CASE WHEN NOT v_windows THEN
                        coalesce(d.line_transaction_id, (pg_current_xact_id()::text::numeric - 1)::text::xid8) END,
                    line_position = CASE WHEN NOT v_windows THEN 9223372036854775807 END
                WHERE d.processor_id = p_processor_id;
                UPDATE processor_partitions d
                SET next_count = NULL, asked_at = NULL, line_transaction_id = NULL, line_position = NULL,
                    line_mark = NULL, line_snapshot = NULL
                WHERE d.processor_id = p_processor_id AND d.next_count = d.partition_count;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        SELECT d.partition_count, d.key, d.next_count FROM processor_partitions d
        WHERE d.processor_id = p_processor_id;
END
$function$;
