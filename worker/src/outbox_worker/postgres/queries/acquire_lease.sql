-- Become owner under a fresh epoch, or learn who is.
SELECT acquired, epoch, pod, expires_at
FROM {schema}.acquire_lease(
    %(processor_id)s, %(partition)s, %(claim_uid)s, %(pod)s, %(token)s::uuid, %(lease)s::interval)
