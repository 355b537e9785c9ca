-- Carry out a person's decision.
SELECT {schema}.resolve_conflict(
    %(conflict_id)s, %(action)s, %(transaction_id)s::xid8, %(position)s, %(decided_by)s)
