"""`outbox try`: an embedded PostgreSQL, a shop that produces orders, three processors, and a ledger that counts.

    place       the run's folder, its lock, and what a former run left there
    cache       what is kept between runs
    guard       a process that ends everything and removes the folder, however the run ends
    children    the run's other processes
    server      the PostgreSQL server and the prepared data folder that it is copied from
    shop        eight connections that place orders; their commit logs are what was produced
    processors  the three processors and their worker processes
    pokes       the commands that the run tells the reader to try
    screen      the live table
    ledger      what was produced, compared with what was handled
    run         the order of all this

Only `run` imports the worker and psycopg, and late: the server starts while Python imports.
"""
