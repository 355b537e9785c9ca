-- The epoch is never looked at: whoever calls is the owner.
CREATE OR REPLACE FUNCTION outbox.holds_lease(p_processor_id text, p_partition integer, p_epoch bigint, p_owner_token uuid)
RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
