-- Every id that has to change, restored ones first, and the smallest ids that keep their order.
WITH found (written_here, t) AS MATERIALIZED ({found})
INSERT INTO {schema}.repair_ids (repair_id, written_here, old_transaction_id, new_transaction_id)
SELECT %(repair_id)s, f.written_here, f.t,
       CASE WHEN f.t < '3'::xid8 THEN f.t
            ELSE (2 + row_number() OVER (PARTITION BY f.t < '3'::xid8 ORDER BY f.written_here, f.t))::text::xid8 END
FROM found AS f
