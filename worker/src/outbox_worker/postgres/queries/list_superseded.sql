-- Processors that were replaced by a swap: they never run again.
SELECT of_processor_id FROM {schema}.processor_rebuilds WHERE swapped_at IS NOT NULL
