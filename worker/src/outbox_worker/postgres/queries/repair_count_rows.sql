-- How many messages came with the restore, and were written here since, below the bound.
SELECT o.written_here, count(*), min(o.t::text::numeric)::text, max(o.t::text::numeric)::text
FROM (SELECT o.t::text::numeric > %(until)s AND o.t::text::numeric <= %(now)s - age(o.xmin) AS written_here, o.t
      FROM ({rows}) AS o (t, xmin)) AS o
WHERE NOT o.written_here OR o.t < %(below)s::text::xid8
GROUP BY o.written_here
