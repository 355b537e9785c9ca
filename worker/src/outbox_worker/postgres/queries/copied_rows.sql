-- Messages of a window that are kept for when their time has come.
ARRAY(SELECT ROW({processor_id}, d.transaction_id, d.position, d.message_id, d.message_type, d.publication_id,
                 d.partition_key, d.data, d.metadata, d.scheduled, d.deliver_after)::{schema}.competing_copies
      FROM ({rows}) AS d WHERE d.position = ANY ({positions}::bigint[]))
