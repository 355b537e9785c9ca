"""`make chaos`: faults by a seed against real servers and worker processes, and a ledger at the end.

Pure: `cases` (what runs), `config` (what its workers are told), `rounds` (which cases at once), `schedule` (which fault
when), `recovery` (how long each took), `verdict` (what is wrong), `result` and `summary` (a run in numbers, in text).
Doing: `servers`, `proxies`, `pods` (processes of one case), `victims`, `faults` (carries them out), `director` (a run).
Programs of their own: `producer`, `observer`. The counting itself is `tests.tools.ledger`, which the demo uses too.
"""
