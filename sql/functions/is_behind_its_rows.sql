CREATE OR REPLACE FUNCTION :"schema".is_behind_its_rows() RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Is a message or a checkpoint stored here whose transaction id is above that of the transaction that wrote the row? Then it came from a
-- server that was further on, and what is written here since sorts before it. True for good, also once this server's
-- counter has passed it; until `outbox repair`. Scans the outbox once.
DECLARE
    v_now bigint := pg_current_xact_id()::text::bigint;  -- assigned first: age() counts from it
BEGIN
    RETURN EXISTS (SELECT 1 FROM processor_checkpoints c
                   WHERE c.last_processed_transaction_id::text::numeric > v_now - age(c.xmin))
        OR EXISTS (SELECT 1 FROM messages o WHERE o.transaction_id::text::numeric > v_now - age(o.xmin));
END
$function$;
