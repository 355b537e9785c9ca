-- Keep messages of a range that are not handled, in the transaction that passes them. Their payloads never leave the
-- database. Beside the answer: how many of them the range has.
WITH chosen AS MATERIALIZED (
    SELECT b.*
    FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
    WHERE (b.transaction_id, b.position) IN (
        SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))
)
SELECT {schema}.hold_messages({processor_id}, {partition}, {epoch}, {token}::uuid,
    (SELECT coalesce(array_agg(
        ROW(NULL, 0, c.key, NULL, 0, c.transaction_id, c.position, c.message_id, c.message_type, c.publication_id,
            c.partition_key, c.data, c.metadata, c.scheduled, false, false, 0, 0, NULL, NULL, NULL, c.deliver_after
        )::{schema}.held_messages ORDER BY c.n), '{{}}')
     FROM chosen AS c),
    {verdicts}::jsonb) AS kept,
    (SELECT count(*) FROM chosen) AS found
