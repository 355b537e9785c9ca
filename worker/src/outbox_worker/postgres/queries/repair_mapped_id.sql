-- An expression: what becomes of an id.
(SELECT m.new_transaction_id FROM {schema}.repair_ids AS m
 WHERE m.repair_id = %(repair_id)s AND m.written_here = {written_here} AND m.old_transaction_id = {value})
