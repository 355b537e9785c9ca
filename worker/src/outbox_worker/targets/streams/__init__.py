"""RabbitMQ's protocol of streams for the target `rabbitmqStream`: frames, connection, messages."""
