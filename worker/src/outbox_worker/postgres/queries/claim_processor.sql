-- Ask for the processor, or say again that it is ours.
SELECT granted, cluster, namespace, name, uid, claimed_at, vacated_at
FROM {schema}.claim_processor(
    %(processor_id)s, %(cluster)s, %(namespace)s, %(name)s, %(uid)s, %(force)s, %(sweep_uids)s::text[])
