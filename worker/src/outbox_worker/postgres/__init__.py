"""The PostgreSQL adapter: everything that knows psycopg, and nothing that decides.

`connection.py` opens connections from a mounted Secret; `call.py` calls functions of the schema and loads our other
statements; `schema.py` brings the schema up or checks it; `identity.py` says which database this is.
`ownership/` is claim and lease; `progress/` the stored checkpoint and conflicts about it; `reading/` finds messages by
it, and `feeds/` those that are handed out otherwise; `transactions/` commits effects and checkpoint together; `admin/`
is for people. Functions take an open connection and a `ProcessorKey` and never commit: the caller owns the transaction.
Driver errors leave translated (`errors.py`).
"""
