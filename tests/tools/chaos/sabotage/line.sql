-- The number of partitions changes at once, wherever each of them is.
CREATE OR REPLACE FUNCTION outbox.partitions_are_at_barrier(p_processor_id text) RETURNS boolean LANGUAGE sql AS $$
    SELECT d.next_count IS NOT NULL FROM outbox.processor_partitions d WHERE d.processor_id = p_processor_id
$$;
