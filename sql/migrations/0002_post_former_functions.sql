-- Functions that only workers of former versions call, with what takes their place.

DROP FUNCTION IF EXISTS
    :"schema".take_batch,  -- take_waiting
    :"schema".defer_message,  -- defer_messages
    :"schema".promote_delayed,  -- promote_waiting
    :"schema".set_aside,  -- hold_messages
    :"schema".fail_held_message,  -- fail_held_messages
    :"schema".try_parts,  -- search_batch
    :"schema".rewrite_checkpoints;  -- nothing
