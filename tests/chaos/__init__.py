"""`make chaos`: faults by a seed against real servers and worker processes, and a ledger at the end.

Pure: `cases` (what runs), `schedule` (which fault when), `recovery` (how long each took), `verdict` (what is wrong).
Doing: `servers`, `proxies`, `pods` (the processes of one case), `faults` (carries them out), `director` (a whole run).
Programs of their own: `producer`, `observer`. The counting itself is `tests.ledger`, which the demo uses too.
"""
