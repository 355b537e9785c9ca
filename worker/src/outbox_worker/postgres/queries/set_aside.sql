-- Keep messages of a range that are not handled, in the transaction that passes them. Their payloads never leave the
-- database.
SELECT {schema}.set_aside({processor_id}, {partition}, {epoch}, {token}::uuid,
    (SELECT coalesce(array_agg(
        ROW(NULL, 0, b.key, NULL, 0, b.transaction_id, b.position, b.message_id, b.message_type, b.publication_id,
            b.partition_key, b.data, b.metadata, b.scheduled, false, false, CASE WHEN b.aside THEN 0 ELSE 1 END, 0,
            NULL, NULL, NULL, b.deliver_after)::{schema}.held_messages ORDER BY b.n), '{{}}')
     FROM (SELECT r.*, row_number() OVER () AS n,
                  (r.transaction_id, r.position) IN (
                      SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p)) AS aside
           FROM ({rows}) AS r) AS b
     WHERE b.aside OR {failing}),
    {action}, {attempts}, {error_class}, {error}, {wait}::interval, {blocks})
