"""The PostgreSQL adapter: everything that knows psycopg, and nothing that decides.

`connection.py` opens connections from a mounted Secret; `schema.py` brings the schema up or checks it;
`ownership/leases.py` is claim and lease; `checkpoints.py` the contract of the stored pair and where a new processor
starts; `conflicts.py` refusals and what people decided; `messages.py` reads the outbox; `stall.py` says who holds
reading back. Functions take an open connection and a `ProcessorKey` and never commit: the caller owns the transaction.
Driver errors leave translated (`errors.py`).
"""
