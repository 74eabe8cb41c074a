"""Asking for a job, following it, and many of them."""
