CREATE OR REPLACE FUNCTION :"schema".set_aside(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_rows :"schema".held_messages[],
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- hold_messages() as workers of a former version call it: of `p_rows` those with attempts > 0 failed, all with one verdict.
    SELECT hold_messages(p_processor_id, p_partition, p_epoch, p_owner_token, p_rows,
        (SELECT coalesce(jsonb_agg(jsonb_build_object(
            't', r.transaction_id::text, 'p', r.position, 'action', p_action, 'attempts', p_attempts,
            'class', p_error_class, 'error', p_error, 'wait', extract(epoch FROM p_wait), 'blocks', p_blocks)), '[]')
         FROM unnest(p_rows) AS r WHERE r.attempts > 0))
$function$;
