-- A held message is looked up by its place or by its key. With the place first, the planner has no reason to read the primary key
-- for a key: until the table is analysed it takes any index for as good as the other, and read every held message for each one of a batch.
ALTER TABLE :"schema".held_messages DROP CONSTRAINT held_messages_pkey;
ALTER TABLE :"schema".held_messages ADD CONSTRAINT held_messages_pkey PRIMARY KEY (transaction_id, position, processor_id, partition);
