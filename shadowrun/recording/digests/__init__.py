"""Digests of tensors: on the host, by operators or a Triton kernel on a device, and many at a time."""
