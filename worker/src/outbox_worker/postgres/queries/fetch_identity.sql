-- Which database the rows say this is, and which it is.
SELECT i.database_uuid::text, i.system_identifier::text, i.database_oid::text, i.timeline_id, i.repair_begun_at, i.rebased,
       s.system_identifier::text AS actual_system, d.oid::text AS actual_oid,
       {schema}.current_timeline() AS actual_timeline
FROM pg_control_system() AS s
CROSS JOIN pg_database AS d
LEFT JOIN {schema}.database_identity AS i ON true
WHERE d.datname = current_database()
