CREATE OR REPLACE FUNCTION :"schema".say_word(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_words jsonb, p_lease interval,
    p_ended boolean DEFAULT false
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- What a process says of itself, for a person who asks the database: with its heartbeat, and when it ends. Only a process
-- of the claim's resource is heard. Its word replaces those of processes that ended or are silent. Null: nothing to say.
BEGIN
    IF p_words IS NULL OR p_words = '[]' THEN
        RETURN false;
    END IF;
    INSERT INTO processor_words AS w (processor_id, token, pod, words, heard_until, ended)
    SELECT p_processor_id, p_token, p_pod, p_words, clock_timestamp() + p_lease, p_ended
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE
    SET pod = p_pod, words = p_words, said_at = clock_timestamp(), heard_until = clock_timestamp() + p_lease,
        ended = p_ended;
    IF NOT FOUND OR p_ended THEN
        RETURN FOUND;
    END IF;
    DELETE FROM processor_words w
    USING (SELECT g.token FROM processor_words g
           WHERE g.processor_id = p_processor_id AND g.token <> p_token
             AND (g.ended OR g.heard_until < clock_timestamp())
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE w.processor_id = p_processor_id AND w.token = gone.token;
    RETURN true;
END
$function$;
