-- Hands the batch out and ends the transaction.
SELECT b.id, b.lane, b.attempt, b.lower_snapshot::text, b.upper_snapshot::text, b.after_transaction_id::text,
       b.after_position, b.upto_transaction_id::text, b.upto_position, b.messages, b.piece, b.deaths,
       b.transaction_ids::text[], b.positions, b.attempts, b.aside
FROM {schema}.cut_batch({processor_id}, {lane}, {frontier}, {lower}::pg_snapshot, {upper}::pg_snapshot,
                        {after_transaction_id}::xid8, {after_position}, {upto_transaction_id}::xid8, {upto_position},
                        {whole}, {messages}, {keys}::text[], {delayed}, {owner}, {pod}, {lease}::interval) AS b;
COMMIT
