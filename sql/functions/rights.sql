-- Only the owner may call a function until it is granted: a producer must not be able to claim a processor. The last file of the set.

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
-- Producers compute the one for the index that readers of partitions need; the other runs the caller's own statements.
GRANT EXECUTE ON FUNCTION :"schema".hash_slot(text), :"schema".try_parts(text, text[]) TO PUBLIC;
