-- Which server and database this is, and how far its transaction ids are.
SELECT s.system_identifier::text, d.oid::text, d.datname, pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM pg_control_system() AS s
CROSS JOIN pg_database AS d
WHERE d.datname = current_database()
