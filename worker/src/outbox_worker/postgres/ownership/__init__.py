"""Claims, leases, members and partitions in the database, and what processes say there."""
