-- Of each lane of a queue the first message that was not handed out: when it was stored. Stragglers of the window before come first.
SELECT l.lane, head.scheduled
FROM unnest({lanes}::int[], {starts}::text[], {positions}::bigint[], {ends}::text[], {uppers}::text[], {stragglers}::text[])
     AS l (lane, start, position, upto, upper_snapshot, stragglers)
CROSS JOIN LATERAL (
    SELECT h.scheduled FROM (
        (SELECT o.transaction_id, o.position, o.scheduled FROM {table} AS o
         WHERE l.stragglers <> '' AND {live} AND o.priority = l.lane
           AND o.transaction_id = ANY (string_to_array(l.stragglers, ',')::xid8[])
         ORDER BY o.transaction_id, o.position LIMIT 1)
        UNION ALL
        (SELECT o.transaction_id, o.position, o.scheduled FROM {table} AS o
         WHERE {live} AND o.priority = l.lane AND (o.transaction_id, o.position) > (l.start::xid8, l.position)
           AND o.transaction_id < l.upto::xid8 AND pg_visible_in_snapshot(o.transaction_id, l.upper_snapshot::pg_snapshot)
         ORDER BY o.transaction_id, o.position LIMIT 1)
    ) AS h ORDER BY h.transaction_id, h.position LIMIT 1
) AS head
