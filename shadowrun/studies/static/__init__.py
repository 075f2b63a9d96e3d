"""Static coverage: the operators that a device lacks by torch's kernel tables, without running them."""
