"""Runs scripts and commands in processes of their own, each forked from one that has imported torch already.

A new process takes two seconds of processor time before it does anything, a forked one a tenth of a second. What is
tested of a process from its start (signals, terminals, imports, threads of OpenMP) takes a new one.
"""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from shadowrun.studies.isolation.process import own_command

LIMIT_S = 600

SERVER = """
import atexit, gc, json, os, runpy, sys, threading, traceback, warnings
import torch
gc.freeze()  # no operator has run: a child reads the variables that choose its kernels


def work(order):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(order["streams"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = order["words"]
    try:
        if order["command"]:
            sys.path.remove("")  # the script that pip installs does not find the modules of a folder
            from shadowrun.cli.main import main

            return main()
        warnings.simplefilter("ignore")
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    child = os.fork()
    if not child:
        status = 70
        try:
            status = work(json.loads(line))
            threading._shutdown()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # to take torch down takes a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


class Forked:
    """The process that others are forked from; use it in a ``with`` block.

    Args:
        also: Modules to import before, in addition to torch: ``"a, b"``.
    """

    def __init__(self, also="shadowrun.sim.registered_device"):
        self._also = also

    def __enter__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a forked child has no thread pool
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"import {self._also}\n{SERVER}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(self, path, *words, **environment):
        """Run a script; exit status, and what it printed in one text."""
        return self._order([str(path), *words], 1, str(Path.cwd()), environment)

    def try_script(self, path, **environment):
        """Run a script as `shadowrun.repro.script.run_script` does, with its errors apart from what it prints."""
        return self._order([str(path)], 2, str(Path.cwd()), environment)

    def shadowrun(self, words, folder, environment):
        """Run a command of shadowrun."""
        return self._order(["shadowrun", *map(str, words)], 2, str(folder), environment)

    def _order(self, words, n_streams, folder, environment):
        with tempfile.TemporaryDirectory() as outputs:
            streams = [f"{outputs}/{number % n_streams}" for number in range(2)]
            order = {
                "words": words,
                "command": words[0] == "shadowrun",
                "streams": streams,
                "folder": folder,
                "environment": os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            }
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            if not select.select([self._server.stdout], [], [], LIMIT_S)[0]:
                self._server.kill()
                raise subprocess.TimeoutExpired(words, LIMIT_S)
            status = int(self._server.stdout.readline())
            texts = [Path(path).read_text(encoding="utf-8") for path in dict.fromkeys(streams)]
        return subprocess.CompletedProcess(words, status, *texts, *[""] * (2 - len(texts)))


@functools.cache
def _commands():
    """The process that commands are forked from, until the tests end: no device is registered in it."""
    server = Forked("shadowrun.cli.main, shadowrun.comparison, shadowrun.report.document, rich.table, jinja2")
    server.__enter__()
    atexit.register(server.__exit__)
    return server


def script(text, *words, **environment):
    """Run a script that is not of the simulated device in a forked process; what it printed is one text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text, encoding="utf-8")
        return _commands().run(path, *words, **environment)


class Subprocess:
    """In place of the module `subprocess` in a study that starts ``shadowrun`` itself: the commands are forked.

    A thread count has to be in the platform: the variables of OpenMP are read when torch is loaded.
    """

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT

    @staticmethod
    def run(command, *, env, **_):
        done = shadowrun(*command[len(own_command()) :], **env)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.encode(), done.stderr.encode())

    class Popen:
        """One that has ended when it is there."""

        def __class_getitem__(cls, _):
            return cls

        def __init__(self, command, *, env, stdout, **_):
            self._done = Subprocess.run(command, env=env)
            stdout.write(self._done.stdout + self._done.stderr)

        def wait(self):
            return self._done.returncode


def shadowrun(*words, folder=".", **environment):
    """Run a command of shadowrun in a forked process; exit status, standard output and standard error."""
    return _commands().shadowrun(words, Path(folder).absolute(), environment)
