CREATE OR REPLACE FUNCTION :"schema".forget_emptying() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- A batch is done: who has an older snapshot sees it in hand, so its table is not what may_empty saw before.
BEGIN
    DELETE FROM emptyings e WHERE e.child = TG_TABLE_NAME;
    RETURN NULL;
END
$function$;
