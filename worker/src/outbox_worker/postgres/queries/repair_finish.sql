WITH done AS (DELETE FROM {schema}.repair_ids AS m WHERE m.repair_id = %(repair_id)s),
finished AS (UPDATE {schema}.repairs AS r SET finished_at = clock_timestamp() WHERE r.id = %(repair_id)s)
UPDATE {schema}.database_identity SET repair_begun_at = NULL, rebased = rebased + 1
