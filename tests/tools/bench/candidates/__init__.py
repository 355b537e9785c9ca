"""What cases compare: `worker` is the product, every other module one peer or one smaller program."""
