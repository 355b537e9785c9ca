-- What a new owner must know of its partition.
SELECT owned, any_held, blocking, coalesce(deaths, 0), coalesce(kills, 0), coalesce(suspects, 0)
FROM {schema}.review_lane(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(generation)s,
    %(forgive)s)
