-- Mode Competing: a batch is completed for every caller, however often others have taken it meanwhile.
CREATE OR REPLACE FUNCTION outbox.complete_batch(
    p_processor_id text, p_batch bigint, p_owner text, p_attempt int,
    p_upto_transaction_id xid8, p_upto_position bigint, p_messages int
) RETURNS boolean LANGUAGE sql AS $$
    DELETE FROM outbox.competing_batches b WHERE b.processor_id = p_processor_id AND b.id = p_batch
       AND (b.upto_transaction_id, b.upto_position) <= (p_upto_transaction_id, p_upto_position);
    SELECT true
$$;
