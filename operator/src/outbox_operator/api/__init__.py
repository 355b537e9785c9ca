"""The resource: spec, status, rules for its pods, names of what belongs to it, and what was observed. PURE."""
