"""How much slower a platform is, operator by operator: each timed on both in turn, with the noise beside it."""
