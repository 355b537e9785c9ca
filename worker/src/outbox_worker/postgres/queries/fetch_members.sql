-- Live processes, the oldest first.
SELECT m.token
FROM {schema}.processor_members AS m
WHERE m.processor_id = %(processor_id)s AND m.claim_uid = %(claim_uid)s AND m.expires_at > clock_timestamp()
ORDER BY m.joined_at, m.token
