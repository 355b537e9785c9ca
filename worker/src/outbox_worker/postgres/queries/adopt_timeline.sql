SELECT {schema}.adopt_timeline(%(processor_id)s::text, %(cluster)s::text, %(namespace)s::text, %(name)s::text,
                               %(uid)s::text)
