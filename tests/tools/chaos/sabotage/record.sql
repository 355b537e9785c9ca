-- Each takeover counts as a rewind, after which what Kafka's checkpoint topic names is to be published again.
CREATE FUNCTION chaos.record_rewind() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO outbox.audit_log (action, processor_id, partition, reason, decided_by)
    VALUES ('Rewind', NEW.processor_id, NEW.partition, 'sabotage', 'chaos');
    RETURN NULL;
END
$$;
CREATE TRIGGER record_rewind AFTER UPDATE ON outbox.processor_leases
    FOR EACH ROW WHEN (NEW.epoch > OLD.epoch) EXECUTE FUNCTION chaos.record_rewind();
CREATE TRIGGER record_first_rewind AFTER INSERT ON outbox.processor_leases
    FOR EACH ROW EXECUTE FUNCTION chaos.record_rewind();
