CREATE OR REPLACE FUNCTION :"schema".may_empty(p_child text, p_mark text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- May a table in which nothing is needed any more be truncated? For a caller that has it locked, in READ COMMITTED. Whoever has
-- a snapshot from before must not read it afterwards: pg_dump takes its snapshot first and its locks later, and would find
-- the table empty beside others from when it was needed. So it is truncated at the third look at the earliest, when
-- everybody's snapshot is younger than the second, and at the second everybody's was younger than the first: also one that
-- was imported in between from a session that is gone. p_mark changes when anything was stored in it since.
DECLARE
    v_note emptyings;
BEGIN
    PERFORM pg_stat_clear_snapshot();
    SELECT e.* INTO v_note FROM emptyings e WHERE e.child = p_child;
    IF v_note.mark = p_mark AND holds_older_snapshot(v_note.seen_at, v_note.seen_id) THEN
        RETURN false;
    ELSIF v_note.mark = p_mark AND v_note.looks > 1 THEN
        DELETE FROM emptyings e WHERE e.child = p_child;
        RETURN true;
    END IF;
    INSERT INTO emptyings AS e (child, mark, looks, seen_at, seen_id)
    VALUES (p_child, p_mark, 1, clock_timestamp(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
    ON CONFLICT (child) DO UPDATE
    SET mark = excluded.mark, looks = CASE WHEN e.mark = excluded.mark THEN e.looks + 1 ELSE 1 END,
        seen_at = excluded.seen_at, seen_id = excluded.seen_id;
    RETURN false;
END
$function$;
