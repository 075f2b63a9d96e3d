"""The paths of a call: on one device, on two, asynchronous, on a lazy device, under two settings."""
