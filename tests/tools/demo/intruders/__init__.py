"""Everybody who has no business with a checkpoint, one module each, in the order of the story.

Each says what it does, what it is told, and what the resource then says, within ten seconds; anything else fails the
demo.
"""
