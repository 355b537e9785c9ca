-- Leave without knowing why: the claim lapses after its grace unless a pod of the resource returns.
SELECT {schema}.vacate_claim(%(processor_id)s, %(uid)s)
