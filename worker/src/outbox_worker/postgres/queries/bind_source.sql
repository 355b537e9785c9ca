-- Which database the processor reads: write it down, or learn what is written.
SELECT bound, described, source
FROM {schema}.bind_processor_source(%(processor_id)s, %(claim_uid)s, %(source)s, %(described)s)
