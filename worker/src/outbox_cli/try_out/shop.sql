-- The shop of `outbox try`: its own tables, and what its three processors make of the messages.
CREATE SCHEMA shop;

CREATE TABLE shop.orders (
    order_key text        NOT NULL PRIMARY KEY,
    customer  text        NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- orders-totals: a projection, and one line for each message that went into it.
CREATE TABLE shop.order_totals (
    order_key text    NOT NULL PRIMARY KEY,
    messages  bigint  NOT NULL,
    cents     numeric NOT NULL
);
CREATE TABLE shop.totals_lines (
    line          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id    text NOT NULL,
    partition_key text
);

-- orders-loyalty: points by customer.
CREATE TABLE shop.loyalty_points (
    customer text   NOT NULL PRIMARY KEY,
    points   bigint NOT NULL
);
CREATE TABLE shop.loyalty_lines (
    line          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id    text NOT NULL,
    partition_key text
);

-- orders-parcels: one parcel for each message, in any order.
CREATE TABLE shop.parcels_lines (
    line          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id    text NOT NULL,
    partition_key text
);
