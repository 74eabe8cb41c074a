"""From the records of many runs to tables, figures and a page."""
