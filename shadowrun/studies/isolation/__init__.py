"""Cases in worker processes that may crash, hang or exhaust memory: such a death is the outcome of one case."""
