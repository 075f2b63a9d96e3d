"""Operator sweep: each operator of torch's test database (OpInfo) on two platforms, one small case at a time.

`opinfo` and `recorded` generate inputs, `programs` turns them into calls, and `run_case` runs one case and returns its
findings. `worker` runs cases in a child process, `pool` manages these processes, and `run_sweep` is the whole sweep.
`coverage_file` stores the results; `support` and `report` make tables from it, `scripts` makes reproduction scripts.
"""
