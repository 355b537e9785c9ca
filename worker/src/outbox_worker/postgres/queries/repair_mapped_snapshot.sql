-- An expression: a snapshot that sees of the mapped ids what the old one saw of the old ids. An end between two ids
-- becomes the next id.
(coalesce(
    (SELECT m.new_transaction_id::text FROM {schema}.repair_ids AS m
     WHERE m.repair_id = %(repair_id)s AND NOT m.written_here AND m.old_transaction_id >= pg_snapshot_xmin({value})
     ORDER BY m.old_transaction_id LIMIT 1),
    (SELECT (max(m.new_transaction_id::text::numeric) + 1)::text FROM {schema}.repair_ids AS m
     WHERE m.repair_id = %(repair_id)s AND NOT m.written_here), '3')
 || ':' || coalesce(
    (SELECT m.new_transaction_id::text FROM {schema}.repair_ids AS m
     WHERE m.repair_id = %(repair_id)s AND NOT m.written_here AND m.old_transaction_id >= pg_snapshot_xmax({value})
     ORDER BY m.old_transaction_id LIMIT 1),
    (SELECT (max(m.new_transaction_id::text::numeric) + 1)::text FROM {schema}.repair_ids AS m
     WHERE m.repair_id = %(repair_id)s AND NOT m.written_here), '3')
 || ':' || coalesce((SELECT string_agg(m.new_transaction_id::text, ',' ORDER BY m.new_transaction_id)
                     FROM pg_snapshot_xip({value}) AS open (id)
                     JOIN {schema}.repair_ids AS m ON m.repair_id = %(repair_id)s AND NOT m.written_here
                      AND m.old_transaction_id = open.id), ''))::pg_snapshot
