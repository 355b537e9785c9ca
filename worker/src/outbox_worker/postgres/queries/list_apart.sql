-- Processors whose messages are in another database, and in which.
SELECT processor_id, source FROM {schema}.processor_sources
