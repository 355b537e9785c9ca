-- Held messages as the relation `batch`, in the order of their keys.
SELECT h.transaction_id, h.position, h.message_id, h.message_type, h.publication_id, h.partition_key,
       h.data::jsonb AS data, h.metadata::jsonb AS metadata, h.scheduled, h.place AS ordinal
FROM {schema}.held_messages AS h
WHERE h.processor_id = {processor_id} AND h.partition = {partition}
  AND (h.transaction_id, h.position) IN (
      SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))
ORDER BY h.place
