"""The commands that run, read and write comparisons and recordings, one file each."""
