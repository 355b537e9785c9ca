-- A message at or above the bound that was not written here: restored while the repair ran.
SELECT EXISTS (SELECT 1 FROM {table} AS o
               WHERE o.{transaction_id} >= %(below)s::text::xid8
                 AND o.{transaction_id}::text::numeric > %(now)s - age(o.xmin))
