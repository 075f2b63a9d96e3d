"""Worker processes: operators under settings that a process reads once, or with another torch."""
