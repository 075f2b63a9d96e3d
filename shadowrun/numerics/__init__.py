"""Pure functions on two tensors: no devices, no state."""
