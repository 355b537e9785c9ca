-- One part after the other, until one is refused; what got through is out of reach of a later roll-back to the savepoint.
SELECT {schema}.try_parts({prepare}, {parts}); RELEASE SAVEPOINT outbox_part; SAVEPOINT outbox_part
