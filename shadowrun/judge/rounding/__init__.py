"""How far rounding may move a result: bounds in units of rounding, closeness without the oracle, and bias."""
