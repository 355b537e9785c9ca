"""Reads the outbox: tables, indexes, both cursors, and who holds the high-water mark back.

- `messages.py`: the reader of a processor or partition. It reads in the cursor TransactionOrder itself.
- `range_reader.py`, `snapshots.py`: the cursor Snapshot. `dispatch_reader.py`: mode Competing.
- `table.py`: the table and its columns; `range_scan.py`: the SELECTs that find its messages.
- `read_range.py`: which messages a statement is about, and statements that are composed once.
- `payloads.py`: bounds a batch by bytes. `ahead.py`: asks for the next batch while one is handled.
- `shared_look.py`, `arrivals.py`: one look for all partitions of a process, in a backlog and at rest.
- `wal_watch.py`: says when there may be messages. `slots.py`: the index that partitions are read by.
- `stall.py`: who holds the high-water mark back.
"""
