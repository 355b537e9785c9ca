"""RabbitMQ's protocol for the target `rabbitmq`: connection, login, confirms."""
