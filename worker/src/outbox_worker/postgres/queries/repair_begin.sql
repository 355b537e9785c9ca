WITH begun AS (
    INSERT INTO {schema}.repairs (restored_until, below, planned_by, tables, reason, decided_by)
    VALUES (%(until)s::text::xid8, %(below)s::text::xid8, %(now)s::text::xid8, %(tables)s, %(reason)s, %(decided_by)s)
    RETURNING id
), flagged AS (UPDATE {schema}.database_identity SET repair_begun_at = clock_timestamp())
SELECT id FROM begun
