"""`outbox try`: an embedded PostgreSQL, a shop that produces orders, three processors, and a ledger that counts.

Start with `run.py`: it has the order of all this. Only it imports the worker and psycopg, and late: the server starts
while Python imports.
"""
