"""Regions that torch.compile made, compared with eager while a program runs."""
