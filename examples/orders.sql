-- The shop of the examples. Its own tables, and the tables that the example processors write.
-- Run it as the role that the processors connect as:  psql -f examples/orders.sql

CREATE SCHEMA shop;

CREATE TABLE shop.orders (
    order_key text PRIMARY KEY,
    customer  text        NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE shop.visits (
    visit_id   bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    producer   int         NOT NULL,
    visited_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- orders-modes/shared.yaml: which message was mailed.
CREATE TABLE shop.mails (
    message_id text NOT NULL,
    order_key  text NOT NULL
);

-- orders-projection: what each order has come to, and every message in the order in which it was handled. The second
-- table has no unique message_id on purpose: a message that were handled twice would stand in it twice.
CREATE SCHEMA projection;

CREATE TABLE projection.handled_orders (
    handled_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id     text        NOT NULL,
    order_key      text        NOT NULL,
    order_sequence int         NOT NULL,
    cents          bigint      NOT NULL,
    handled_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE projection.order_totals (
    order_key text   PRIMARY KEY,
    messages  bigint NOT NULL,
    cents     bigint NOT NULL,
    status    text   NOT NULL
);

-- orders-loyalty: points of each customer, and every message again.
CREATE SCHEMA loyalty;

CREATE TABLE loyalty.handled_orders (
    handled_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id     text        NOT NULL,
    order_key      text        NOT NULL,
    order_sequence int         NOT NULL,
    cents          bigint      NOT NULL,
    handled_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE loyalty.points (
    customer text   PRIMARY KEY,
    points   bigint NOT NULL
);

-- orders-analytics (Spark): what happened in each minute.
CREATE SCHEMA analytics;

CREATE TABLE analytics.orders_per_minute (
    minute   timestamptz PRIMARY KEY,
    messages bigint NOT NULL,
    cents    bigint NOT NULL
);

-- orders-modes/competing.yaml: every message as it was handled.
CREATE SCHEMA parcels;

CREATE TABLE parcels.handled_orders (
    handled_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id     text        NOT NULL,
    order_key      text        NOT NULL,
    order_sequence int         NOT NULL,
    cents          bigint      NOT NULL,
    handled_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- orders-modes/partitioned.yaml: every message as it was handled.
CREATE SCHEMA search;

CREATE TABLE search.handled_orders (
    handled_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id     text        NOT NULL,
    order_key      text        NOT NULL,
    order_sequence int         NOT NULL,
    cents          bigint      NOT NULL,
    handled_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
