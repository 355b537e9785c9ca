"""PURE: the objects that the operator makes for one resource."""
