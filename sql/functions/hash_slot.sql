CREATE OR REPLACE FUNCTION :"schema".hash_slot(p_key text) RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $function$
-- Of 64 slots the one of a key: the first byte of SHA-256 over its UTF-8 bytes, modulo 64. Partition p of N has the
-- slots s with s % N = p. Indexes are built on it: it can never change.
    SELECT pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.convert_to(p_key, 'UTF8')), 0) OPERATOR(pg_catalog.&) 63
$function$;
