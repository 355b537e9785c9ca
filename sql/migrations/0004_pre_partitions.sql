-- Partitioned mode: how a processor is divided, and among which processes. A partition is a row of processor_checkpoints and of
-- processor_leases like any other.

CREATE TABLE :"schema".processor_partitions (
    processor_id    text        NOT NULL,
    partition_count int         NOT NULL,
    key             text        NOT NULL,
    begun_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT processor_partitions_pkey PRIMARY KEY (processor_id),
    CONSTRAINT processor_partitions_count_is_in_range CHECK (partition_count BETWEEN 1 AND 64)
);

COMMENT ON TABLE :"schema".processor_partitions IS
    'Into how many partitions a processor is divided, and by which key. Without a row it is not divided.';

CREATE TABLE :"schema".processor_members (
    processor_id text        NOT NULL,
    token        uuid        NOT NULL,
    pod          text        NOT NULL,
    claim_uid    text        NOT NULL,
    joined_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at   timestamptz NOT NULL,
    CONSTRAINT processor_members_pkey PRIMARY KEY (processor_id, token)
) WITH (fillfactor = 50);

COMMENT ON TABLE :"schema".processor_members IS
    'Live processes of a partitioned processor, among which its partitions are divided. Renewed with their leases.';

CREATE OR REPLACE FUNCTION :"schema".hash_slot(p_key text) RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $function$
-- Of 64 slots the one of a key: the first byte of SHA-256 over its UTF-8 bytes, modulo 64. Partition p of N has the
-- slots s with s % N = p. Indexes are built on it: it can never change.
    SELECT pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.convert_to(p_key, 'UTF8')), 0) OPERATOR(pg_catalog.&) 63
$function$;

CREATE OR REPLACE FUNCTION :"schema".begin_partitions(
    p_processor_id text, p_count int, p_key text, p_transaction_id xid8, p_position bigint,
    p_partition int, p_epoch bigint, p_owner_token uuid
) RETURNS TABLE (owned boolean, partition_count int, key text, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- The first owner of any partition writes down how the processor is divided and the one pair from which all of it
-- starts: a partition that is first owned later must not start later. Everybody else learns what was written.
-- No row (partition_count null): the processor has a checkpoint but was never divided.
#variable_conflict use_column
BEGIN
    owned := holds_lease(p_processor_id, p_partition, p_epoch, p_owner_token);
    begun := false;
    IF owned AND p_transaction_id IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM processor_checkpoints c WHERE c.processor_id = p_processor_id) THEN
        -- Of two at once, the other waits here until this one committed.
        INSERT INTO processor_partitions (processor_id, partition_count, key)
        VALUES (p_processor_id, p_count, p_key) ON CONFLICT DO NOTHING;
        begun := FOUND;
        IF begun THEN
            INSERT INTO processor_checkpoints
                (processor_id, partition, last_processed_transaction_id, last_processed_position)
            SELECT p_processor_id, n, p_transaction_id, p_position FROM generate_series(0, p_count - 1) AS n
            ON CONFLICT DO NOTHING;
            PERFORM keep_checkpoint(p_processor_id, NULL);
        END IF;
    END IF;
    SELECT d.partition_count, d.key INTO partition_count, key
    FROM processor_partitions d WHERE d.processor_id = p_processor_id;
    RETURN NEXT;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".renew_membership(
    p_processor_id text, p_claim_uid text, p_pod text, p_token uuid, p_lease interval
) RETURNS TABLE (partition int, epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- The heartbeat of a process that owns some of the partitions: it is one of the members among which they are divided,
-- and so long it keeps what it owns. Both lapse together. Returned: the leases that are still its own.
#variable_conflict use_column
BEGIN
    INSERT INTO processor_members AS m (processor_id, token, pod, claim_uid, expires_at)
    SELECT p_processor_id, p_token, p_pod, p_claim_uid, clock_timestamp() + p_lease
    WHERE EXISTS (SELECT 1 FROM processor_claims c WHERE c.processor_id = p_processor_id AND c.uid = p_claim_uid)
    ON CONFLICT (processor_id, token) DO UPDATE SET expires_at = clock_timestamp() + p_lease;
    DELETE FROM processor_members m
    USING (SELECT g.token FROM processor_members g
           WHERE g.processor_id = p_processor_id AND g.expires_at < clock_timestamp() - p_lease
           FOR UPDATE SKIP LOCKED) AS gone
    WHERE m.processor_id = p_processor_id AND m.token = gone.token;
    RETURN QUERY
        UPDATE processor_leases l
        SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease
        WHERE l.processor_id = p_processor_id AND l.token = p_token AND l.expires_at > clock_timestamp()
        RETURNING l.partition, l.epoch;
END
$function$;

CREATE OR REPLACE FUNCTION :"schema".end_membership(p_processor_id text, p_token uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s'
AS $function$
-- A process leaves: its partitions are free at once, and the others divide them among themselves.
BEGIN
    DELETE FROM processor_members m WHERE m.processor_id = p_processor_id AND m.token = p_token;
    UPDATE processor_leases l SET token = NULL, pod = NULL, claim_uid = NULL, expires_at = 'epoch'
    WHERE l.processor_id = p_processor_id AND l.token = p_token;
END
$function$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
-- Producers compute it for the index that readers of partitions need.
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text) TO PUBLIC;
