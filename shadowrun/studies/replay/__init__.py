"""Calls of a recording run again on another machine, from the inputs that the recording holds."""
