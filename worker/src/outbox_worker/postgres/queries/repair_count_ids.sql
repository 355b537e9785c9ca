-- How many ids change, the highest new one, and the highest old one that came with the restore.
SELECT count(*), coalesce(max(m.new_transaction_id::text::numeric), 0)::text,
       coalesce(max(m.old_transaction_id::text::numeric) FILTER (WHERE NOT m.written_here), 0)::text
FROM {schema}.repair_ids AS m
WHERE m.repair_id = %(repair_id)s
