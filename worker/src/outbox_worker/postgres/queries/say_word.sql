-- What a process says of itself, after its heartbeat and when it ends.
SELECT {schema}.say_word(
    %(processor_id)s, %(claim_uid)s, %(pod)s, %(token)s::uuid, %(words)s::jsonb, %(lease)s::interval, %(ended)s)
