"""Scenes of the demo beside its intruders: kills, and readers in other modes."""
