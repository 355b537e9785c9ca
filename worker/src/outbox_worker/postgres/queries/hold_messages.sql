-- Keep messages of a range that are not handled, in the transaction that passes them. Their payloads never leave the
-- database.
SELECT {schema}.hold_messages({processor_id}, {partition}, {epoch}, {token}::uuid,
    (SELECT coalesce(array_agg(
        ROW(NULL, 0, b.key, NULL, 0, b.transaction_id, b.position, b.message_id, b.message_type, b.publication_id,
            b.partition_key, b.data, b.metadata, b.scheduled, false, false, 0, 0, NULL, NULL, NULL, b.deliver_after
        )::{schema}.held_messages ORDER BY b.n), '{{}}')
     FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
     WHERE (b.transaction_id, b.position) IN (
         SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))),
    {verdicts}::jsonb)
