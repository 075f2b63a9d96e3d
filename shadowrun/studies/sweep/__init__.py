"""Operator sweep: each operator of torch's test database (OpInfo) on two platforms, one small case at a time.

`opinfo` and `recorded_calls` generate inputs, `case_programs` turns them into calls, and `run_case` runs one case and
returns its findings. `worker` runs cases in a child process, and `run_sweep` is the whole sweep. `coverage_file` stores
the results; `reports` makes tables from it, `scripts` makes reproduction scripts.
"""
