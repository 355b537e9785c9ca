CREATE OR REPLACE FUNCTION :"schema".rewrite_checkpoints(p_bytes bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '50ms'
AS $function$
-- Bounds what checkpoints take while somebody's old snapshot keeps VACUUM from their dead versions: once table and indexes are
-- larger than `p_bytes`, and than 4 kB for each checkpoint, the living rows are written anew into the emptied table. False: not
-- needed, or not now. Who holds a lock on the table (a batch about to commit, whoever read it in an open transaction) is not
-- waited for; the caller comes again. A statement that takes its snapshot before it locks the table would find it empty: so
-- would a SQL function that is STABLE, and therefore find_edit is not.
DECLARE
    v_rows processor_checkpoints[];
BEGIN
    IF pg_total_relation_size('processor_checkpoints')
           <= greatest(p_bytes, 4096 * (SELECT count(*) FROM kept_checkpoints))
       -- A snapshot from before the lock would bring back a checkpoint that another has replaced since.
       OR current_setting('transaction_isolation') <> 'read committed'
       -- Somebody's trigger would take these for new checkpoints.
       OR EXISTS (SELECT 1 FROM pg_trigger g WHERE g.tgrelid = 'processor_checkpoints'::regclass)
       OR NOT pg_try_advisory_xact_lock(hashtext('outbox rewrite ' || current_schema())) THEN
        RETURN false;
    END IF;
    LOCK TABLE processor_checkpoints IN ACCESS EXCLUSIVE MODE;
    v_rows := ARRAY(SELECT c FROM processor_checkpoints c);
    TRUNCATE processor_checkpoints;
    INSERT INTO processor_checkpoints SELECT c.* FROM unnest(v_rows) AS c;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$function$;
