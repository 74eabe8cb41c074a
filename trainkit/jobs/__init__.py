"""Around a job: asking for it, seeing beforehand whether it can work, following it, and many of them."""
