-- Who holds the processor, without asking for it.
SELECT false AS granted, cluster, namespace, name, uid, claimed_at, vacated_at
FROM {schema}.processor_claims
WHERE processor_id = %(processor_id)s
