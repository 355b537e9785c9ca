-- Report a refusal, in a transaction of its own.
SELECT {schema}.record_refusal(
    %(processor_id)s, %(partition)s, %(code)s,
    %(expected_transaction_id)s::xid8, %(expected_position)s,
    %(stored_transaction_id)s::xid8, %(stored_position)s,
    %(new_transaction_id)s::xid8, %(new_position)s,
    %(epoch)s, %(pod)s, %(claim_uid)s, %(needs_person)s)
