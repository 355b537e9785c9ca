-- Store a window under our epoch, in the transaction of the batch.
SELECT {schema}.store_processor_window(
    %(processor_id)s, %(partition)s,
    %(new_counter)s, %(new_lower)s::text::pg_snapshot, %(new_upper)s::text::pg_snapshot, %(new_position)s,
    %(expected_counter)s, %(expected_lower)s::text::pg_snapshot, %(expected_upper)s::text::pg_snapshot,
    %(expected_position)s, %(epoch)s, %(token)s::uuid)
