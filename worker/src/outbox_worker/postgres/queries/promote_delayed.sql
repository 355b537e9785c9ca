-- Messages whose time has come are handed out like others.
SELECT {schema}.promote_delayed(%(queue)s, %(limit)s)
