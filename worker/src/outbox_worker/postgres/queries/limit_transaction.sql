-- SET LOCAL with a parameter: idle in the transaction, or a result that the client's side does not take.
SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true),
       set_config('tcp_user_timeout', %(limit)s, true)
