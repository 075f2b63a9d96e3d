"""Several data files as one."""
