-- The numbers of the dead letters that the filters let through, in the order in which they died.
SELECT d.id
FROM {schema}.dead_letters AS d
WHERE (%(processor_id)s::text IS NULL OR d.processor_id = %(processor_id)s)
  AND (%(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[]))
  AND (%(keys)s::text[] IS NULL OR d.key = ANY (%(keys)s::text[]))
  AND (%(message_ids)s::text[] IS NULL OR d.message_id = ANY (%(message_ids)s::text[]))
  AND (%(types)s::text[] IS NULL OR d.message_type = ANY (%(types)s::text[]))
  AND (%(classes)s::text[] IS NULL OR d.error_class = ANY (%(classes)s::text[]))
  AND (%(text)s::text IS NULL OR position(lower(%(text)s::text) IN lower(d.error)) > 0)
  AND (%(since)s::timestamptz IS NULL OR d.died_at >= %(since)s::timestamptz)
  AND (%(until)s::timestamptz IS NULL OR d.died_at < %(until)s::timestamptz)
ORDER BY d.id
