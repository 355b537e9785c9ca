"""The processes of a run: workers, producers, the observer, and the proxies between them and the servers."""
