-- A stretch of the outbox's pages. Done before: rows that this repair wrote, with their ids below the bound; producers' are above.
UPDATE {table} AS o SET {transaction_id} = m.new_transaction_id
FROM {schema}.repair_ids AS m
WHERE o.ctid >= %(first)s::tid AND o.ctid < %(end)s::tid
  AND NOT (%(now)s - age(o.xmin) >= %(planned_by)s AND o.{transaction_id} < %(below)s::text::xid8)
  AND m.repair_id = %(repair_id)s
  AND m.written_here = (o.{transaction_id}::text::numeric > %(until)s
                        AND o.{transaction_id}::text::numeric <= %(now)s - age(o.xmin))
  AND m.old_transaction_id = o.{transaction_id}
  AND m.new_transaction_id <> m.old_transaction_id
