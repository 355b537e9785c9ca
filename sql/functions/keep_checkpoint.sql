CREATE OR REPLACE FUNCTION :"schema".keep_checkpoint(p_processor_id text, p_partition int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- What stands in the row is ours: for functions of ours that have just written it otherwise than by the contract's step 6,
-- and where a person accepts what is there. Partition null: all of them.
BEGIN
    UPDATE processor_checkpoints c
    SET kept_transaction_id = c.last_processed_transaction_id, kept_position = c.last_processed_position,
        kept_window = CASE c.cursor_kind
                      WHEN 'Snapshot' THEN window_seal(c.lower_snapshot, c.upper_snapshot, c.window_position) END
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition);
    INSERT INTO kept_checkpoints (processor_id, partition)
    SELECT c.processor_id, c.partition FROM processor_checkpoints c
    WHERE c.processor_id = p_processor_id AND c.partition = coalesce(p_partition, c.partition)
    ON CONFLICT DO NOTHING;
END
$function$;
