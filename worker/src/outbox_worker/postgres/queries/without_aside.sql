-- A range without the excluded messages.
SELECT r.* FROM ({rows}) AS r
WHERE (r.transaction_id, r.position) NOT IN (
    SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))
