"""The streaming query of a processor: started, resumed, and handed to the worker's loop batch by batch."""
