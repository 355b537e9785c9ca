-- A page of a window, and how many candidates were looked at: more than a cap, and the page is not the window's first.
WITH {found}
SELECT s.looked_at, p.*
FROM (SELECT count(*) AS looked_at FROM found) AS s
LEFT JOIN ({rows}) AS p ON true
ORDER BY p.position
