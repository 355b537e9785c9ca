"""A processor that replaces another one: it catches up beside it, and swaps."""
