"""PURE: what shall be done and what people read, from what was observed. Start in `decide.py`."""
