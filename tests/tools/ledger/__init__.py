"""The ledger: what producers committed, counted against what the targets hold.

It imports nothing from the product (a test reads its syntax trees), so it cannot share a mistake with it: messages are
known by what the producers wrote into their own commit logs, and the targets are read with plain clients.

`commitlog` reads what was committed, `targets` and `amqp` what was handled, `account` compares, `history` looks
at what was true on the way, `plant` spoils a copy to prove that the comparing finds what it must find, `table` prints.
"""
