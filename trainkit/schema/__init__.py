"""What one room writes and others read: the columns of records and of samples, their writers and readers."""
