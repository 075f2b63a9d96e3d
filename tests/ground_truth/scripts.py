"""Runs scripts in processes of their own, each forked from one that has imported torch already: a tenth of the time."""

import json
import os
import subprocess
import sys

SERVER = """
import json, os, runpy, sys, traceback
import torch
import shadowrun.sim.registered_device
torch.ones(2, 2).sum()
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        status = 70
        try:
            out = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(order["environment"])
            sys.argv = [order["script"]]
            try:
                runpy.run_path(order["script"], run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # to take torch down takes a second
"""


class Scripts:
    """The process that scripts are forked from; use it in a ``with`` block.

    Args:
        also: Modules to import before, in addition to torch: ``"a, b"``.
    """

    def __init__(self, also="torch"):
        self._also = also

    def __enter__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a forked child has no thread pool
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import {self._also}\n{SERVER}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(self, path, **environment):
        """Exit status and what it printed."""
        output = path.with_name("output.txt")
        order = {"script": str(path), "output": str(output), "environment": environment}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(str(path), status, output.read_text(), "")
