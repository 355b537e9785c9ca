-- Chaos' own schema: where effects go, and a gate that holds a batch in its middle.

CREATE SCHEMA chaos;

-- As docs/partitioned.md states it, written here a second time: a mistake in the product's own cannot hide in both.
CREATE FUNCTION chaos.partition_of(p_key text, p_count integer) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT get_byte(sha256(convert_to(p_key, 'UTF8')), 0) % 64 % p_count
$$;

-- Which worker a session is of, by its application_name. Where processors share a worker that names the worker alone.
CREATE FUNCTION chaos.worker_of(p_name text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT substring(p_name FROM '[^ ]*worker-[0-9]+')
$$;

-- A producer's own mark in each transaction: by it the producer learns what became of a COMMIT without an answer.
CREATE TABLE chaos.transactions (mark uuid PRIMARY KEY, committed boolean NOT NULL);

-- Keys that all producers write to: whoever writes the next message of one holds its row to the end of the transaction, so
-- that the sequence is the order of the commits.
CREATE TABLE chaos.keys (order_key text PRIMARY KEY, sequence integer NOT NULL DEFAULT 0);
INSERT INTO chaos.keys (order_key) SELECT 'shared-' || n FROM generate_series(1, 6) AS n;

CREATE TABLE chaos.gates (name text PRIMARY KEY, until timestamptz NOT NULL);

-- Before any row is written, so whoever waits here has no transaction id and holds up nobody's high-water mark.
CREATE FUNCTION chaos.pass_gate() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_left double precision;
BEGIN
    SELECT extract(epoch FROM g.until - clock_timestamp()) INTO v_left FROM chaos.gates g WHERE g.name = TG_ARGV[0];
    IF v_left > 0 THEN
        PERFORM pg_sleep(v_left);
    END IF;
    RETURN NULL;
END
$$;
