"""The control plane: turns an OutboxProcessor into pods and tells the truth about it; it never opens the database.

Start with `decide.py`: one pure function from what was observed to what shall be done. Around it: `observe.py` reads
the informers' stores and the workers' reports into one frozen value, `apply.py` carries a decision out through
`kube.py` (the only module that talks to the Kubernetes API), and `controller.py` keeps the loop level-triggered.
"""
