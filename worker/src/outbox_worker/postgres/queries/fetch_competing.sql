-- Over what a processor in mode Competing works; no row: it is of another mode.
SELECT queue FROM {schema}.competing_processors WHERE processor_id = %(processor_id)s
