-- Which run of the server this is: another one after it recovered from a crash.
SELECT {schema}.server_run()::text
