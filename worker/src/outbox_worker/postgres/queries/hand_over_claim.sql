-- Name the resource that shall have the claim next.
SELECT {schema}.hand_over_claim(%(processor_id)s, %(uid)s, %(cluster)s, %(namespace)s, %(name)s)
