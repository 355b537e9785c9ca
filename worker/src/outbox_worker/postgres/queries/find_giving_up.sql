-- Has a person given up the message at this place? A rewind since then asks for it again.
SELECT EXISTS (
    SELECT 1 FROM {schema}.recorded_acts AS a
    WHERE a.act = 'GiveUp' AND a.processor_id = %(processor_id)s AND a.partition = %(partition)s
      AND a.to_transaction_id = %(transaction_id)s::xid8 AND a.to_position = %(position)s
      AND NOT EXISTS (SELECT 1 FROM {schema}.recorded_acts AS r
                      WHERE r.act = 'Rewind' AND r.processor_id = a.processor_id AND r.partition = a.partition
                        AND r.id > a.id))
