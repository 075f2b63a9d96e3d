"""Run every PyTorch operator on a second device and see what differs."""
