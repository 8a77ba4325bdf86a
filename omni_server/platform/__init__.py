"""What a process sets up for itself: its logs, its standard error, and the libraries beside torch."""
