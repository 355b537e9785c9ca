-- Begins a transaction that only reads what another database will remember. Frozen, it must not keep its locks.
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL synchronous_commit = local;
SET LOCAL idle_in_transaction_session_timeout = '60s'
