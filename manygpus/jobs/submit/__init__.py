"""From a request to a job in the queue."""
