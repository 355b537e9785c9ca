-- name: search_batch
-- Which messages of a batch fail; what got through is out of reach of a later roll-back to the savepoint.
SELECT * FROM {schema}.search_batch({name}, {prepare}, {transaction_ids}, {positions}, {keys}, {waiting}, {at}, {failing_before}, {block},
    {most}, {seconds});
RELEASE SAVEPOINT outbox_part; SAVEPOINT outbox_part
