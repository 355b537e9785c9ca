-- What was handed out and is not done: messages in batches, batches, messages that wait for another attempt, live consumers.
SELECT coalesce(sum(b.messages), 0)::bigint, count(*)::int, count(*) FILTER (WHERE b.owner IS NULL OR b.expires_at < clock_timestamp())::int,
       (SELECT count(*) FROM {schema}.competing_retries r WHERE r.processor_id = %(processor_id)s)::int,
       (SELECT count(*) FROM {schema}.processor_members m
        WHERE m.processor_id = %(processor_id)s AND m.expires_at > clock_timestamp())::int,
       coalesce(extract(epoch FROM clock_timestamp() - min(b.cut_at)), 0)::float8
FROM {schema}.competing_batches AS b WHERE b.processor_id = %(processor_id)s
