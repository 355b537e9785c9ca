-- Put the checkpoint where a person says; refused while an owner is live.
SELECT {schema}.rewind_processor_checkpoint(
    %(processor_id)s, %(partition)s, %(transaction_id)s::xid8, %(position)s, %(reason)s, %(decided_by)s)
