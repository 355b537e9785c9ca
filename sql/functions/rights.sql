-- Only the owner may call a function until it is granted: a producer must not be able to claim a processor. The last file of the set.

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
-- Producers compute the first for the index that readers of partitions need; the other runs the caller's own statement.
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text),
    :"schema".search_batch(text, text, xid8[], bigint[], int[], int[], int, int, int, int, double precision) TO PUBLIC;
