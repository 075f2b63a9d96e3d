"""Programs as data: graphs of operator calls, with values that are equal on all machines."""
