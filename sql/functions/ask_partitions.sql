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
#variable_conflict use_column
DECLARE
    v_now processor_partitions;
    v_line xid8;
BEGIN
    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid FOR KEY SHARE;
    IF FOUND THEN
        SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id;
        IF v_now.key = p_key AND p_count BETWEEN 1 AND 64
           AND (v_now.asked_uid, v_now.asked_generation, coalesce(v_now.next_count, v_now.partition_count))
               IS DISTINCT FROM (p_claim_uid, p_generation, p_count) THEN
            SELECT d.* INTO v_now FROM processor_partitions d WHERE d.processor_id = p_processor_id FOR UPDATE;
            IF v_now.asked_uid IS DISTINCT FROM p_claim_uid OR p_generation > v_now.asked_generation THEN
                IF p_count <> v_now.partition_count AND v_now.next_count IS NULL THEN
                    v_line := (pg_current_xact_id()::text::numeric - 1)::text::xid8;
                END IF;
                UPDATE processor_partitions d
                SET asked_uid = p_claim_uid, asked_generation = p_generation, asked_by = p_asked_by,
                    next_count = nullif(p_count, d.partition_count),
                    asked_at = CASE WHEN p_count = d.partition_count THEN NULL
                                    ELSE coalesce(d.asked_at, clock_timestamp()) END,
                    line_transaction_id = CASE WHEN p_count = d.partition_count THEN NULL
                                               ELSE coalesce(d.line_transaction_id, v_line) END,
                    line_position = CASE WHEN p_count = d.partition_count THEN NULL ELSE 9223372036854775807 END
                WHERE d.processor_id = p_processor_id;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        SELECT d.partition_count, d.key, d.next_count FROM processor_partitions d
        WHERE d.processor_id = p_processor_id;
END
$function$;
