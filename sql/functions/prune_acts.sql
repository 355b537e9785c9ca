CREATE OR REPLACE FUNCTION :"schema".prune_acts() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The last 10,000 acts are kept: people's decisions are few, a script that decides may not be.
BEGIN
    DELETE FROM recorded_acts a
    WHERE a.id <= (SELECT k.id FROM recorded_acts k ORDER BY k.id DESC OFFSET 10000 LIMIT 1);
    RETURN NULL;
END
$function$;
