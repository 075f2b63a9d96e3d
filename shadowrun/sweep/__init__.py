"""Every operator of torch's own database on two platforms: which the target has, and what fails.

`opinfo` and `recorded` give the cases, `trial` runs one and says what became of it, `worker` does so in a process of
its own, `pool` keeps such processes, and `coveragefile` keeps the results, from which `support` makes tables.
"""
