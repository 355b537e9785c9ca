-- An expression: what becomes of a list of ids.
(SELECT array_agg(coalesce(m.new_transaction_id, e.id) ORDER BY e.number)
 FROM unnest({value}) WITH ORDINALITY AS e (id, number)
 LEFT JOIN {schema}.repair_ids AS m
   ON m.repair_id = %(repair_id)s AND NOT m.written_here AND m.old_transaction_id = e.id)
