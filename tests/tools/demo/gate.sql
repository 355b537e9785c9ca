-- The demo's own hook in its own tables, to hold one batch of one session exactly in its middle from outside.
-- Every statement that inserts passes two locks: one for its table, where the demo can hold up whoever comes next, and
-- one for its session, where the demo keeps the one it caught while all others go on. Session locks, given back at once:
-- who passes holds nothing afterwards. No transaction id is taken by them, so the high-water mark goes on moving.

CREATE SCHEMA demo;

CREATE FUNCTION demo.pass_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.pg_advisory_lock_shared(7301, TG_RELID::int);
    PERFORM pg_catalog.pg_advisory_unlock_shared(7301, TG_RELID::int);
    PERFORM pg_catalog.pg_advisory_lock_shared(7302, pg_catalog.pg_backend_pid());
    PERFORM pg_catalog.pg_advisory_unlock_shared(7302, pg_catalog.pg_backend_pid());
    RETURN NULL;
END
$$;

CREATE TRIGGER demo_gate BEFORE INSERT ON projection.handled_orders FOR EACH STATEMENT EXECUTE FUNCTION demo.pass_gate();
CREATE TRIGGER demo_gate BEFORE INSERT ON loyalty.handled_orders FOR EACH STATEMENT EXECUTE FUNCTION demo.pass_gate();
CREATE TRIGGER demo_gate BEFORE INSERT ON parcels.handled_orders FOR EACH STATEMENT EXECUTE FUNCTION demo.pass_gate();
CREATE TRIGGER demo_gate BEFORE INSERT ON analytics.orders_per_minute FOR EACH STATEMENT EXECUTE FUNCTION demo.pass_gate();

-- What the script of the intruder writes beside its call, to see it rolled back.
CREATE TABLE demo.script_effects (note text NOT NULL);
