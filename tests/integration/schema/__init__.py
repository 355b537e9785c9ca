"""The schema, outboxes that exist already, grants, dumps and copies."""
