-- A page of a window, and how many candidates were looked at: more than a cap, and the page is not the window's first.
-- Of a page that is not full: the position up to which all was looked at, if the window may go on behind it. One statement,
-- so one snapshot: with two, what others commit or delete between them would make the position that of other rows.
WITH {found},
page AS MATERIALIZED ({rows})
SELECT s.looked_at, r.reached, p.*
FROM (SELECT count(*) AS looked_at FROM found) AS s
CROSS JOIN (SELECT CASE WHEN (SELECT count(*) FROM page) < {size} THEN ({ahead}) END AS reached) AS r
LEFT JOIN page AS p ON true
ORDER BY p.position
