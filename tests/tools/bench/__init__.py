"""`make bench`: the product's worker beside its peers, on the same rows, in the same run.

- `cases/` holds the table of cases, `candidates/` what a case compares (our worker, and the peers), `peers/` the
  programs that peers run as.
- `throughput`, `latency` and `idle` are the ways to measure a case; `turns` lets the candidates take turns.
- `rows` makes the messages, and says what the ledger (`tests/tools/ledger`) must find in each target.
- `servers` starts PostgreSQL and RabbitMQ, `processes` reads CPU and memory from /proc.
- `figures`, `machine`, `table` and `chart` are pure, apart from one function that reads /proc/stat; `report` writes.

`python -m tests.tools.bench --help`
"""
