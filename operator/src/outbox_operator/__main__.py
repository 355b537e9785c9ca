"""`python -m outbox_operator`."""

from outbox_operator.main import main

if __name__ == "__main__":
    main()
