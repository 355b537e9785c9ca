CREATE OR REPLACE FUNCTION :"schema".fail_held_message(
    p_processor_id text, p_partition int, p_epoch bigint, p_owner_token uuid, p_transaction_id xid8, p_position bigint,
    p_action text, p_attempts int, p_error_class text, p_error text, p_wait interval, p_blocks boolean
) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- fail_held_messages() as workers of a former version call it, for one message.
    SELECT fail_held_messages(p_processor_id, p_partition, p_epoch, p_owner_token, jsonb_build_array(jsonb_build_object(
        't', p_transaction_id::text, 'p', p_position, 'action', p_action, 'attempts', p_attempts,
        'class', p_error_class, 'error', p_error, 'wait', extract(epoch FROM p_wait), 'blocks', p_blocks)))
$function$;
