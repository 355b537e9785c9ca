"""Claims, leases and the fence."""
