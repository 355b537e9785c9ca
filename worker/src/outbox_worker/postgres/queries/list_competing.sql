-- Processors in mode Competing, and over what they work.
SELECT processor_id, queue FROM {schema}.competing_processors
