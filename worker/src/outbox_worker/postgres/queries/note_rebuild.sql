-- Write down which processor is to be replaced; learn whether it is.
SELECT of_processor_id, swapped_at, superseded_by
FROM {schema}.note_rebuild(%(processor_id)s, %(of)s, %(epoch)s, %(token)s::uuid)
