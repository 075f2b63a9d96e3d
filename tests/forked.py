"""Python processes that are forked from one with torch: a new one takes three seconds of processor time to start.

`Popen` stands in for `subprocess.Popen`, see the fixture ``forked_processes``: what a test or shadowrun starts with
this interpreter is forked, behaves as a new process does, and is a child of the process that started it. What is tested
of a process from its start (imports, memory, encodings, packages that torch loads) takes a new one.

This file is also the program of the process that they are forked from.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
READ_AT_START = (
    *("GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON"),
    *("SHADOWRUN_NATIVE", "TORCH"),
)
"""Begins variables that Python, torch or another library reads when it is loaded."""
READ_LATER = {
    *("MKL_CBWR", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "PYTHONPATH", "PYTHONSAFEPATH", "TORCHINDUCTOR_CACHE_DIR"),
    # scikit-learn sets them where it is imported, as the tests of transformers do; torch's wheels have another OpenMP.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    # They only say when memory goes back to the system.
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
    *THREADS,  # their number is set
}
PRELOADED = (
    "shadowrun.cli.main",
    "shadowrun.comparison",
    "shadowrun.platforms.worker.main",
    "shadowrun.report.document",
    "shadowrun.sim.registered_device",
    "rich.table",
    "jinja2",
)
"""Imported in addition to torch: none registers a device or runs an operator."""
LIMIT_S = 600
PR_SET_CHILD_SUBREAPER = 36
CAN_FORK = sys.platform == "linux"
"""Whether a process can become the child of another than the one that forked it. Elsewhere, all processes are new."""
BEFORE_TESTS = dict(os.environ)
"""Variables of no test: this file is imported before the first one."""


def read_at_start(environment):
    """The variables that a forked process has read before."""
    # Those of torchrun say which rank a process is.
    is_of_ranks = ("TORCHELASTIC_", "TORCH_NCCL_")
    found = {k: v for k, v in environment.items() if k.startswith(READ_AT_START) and not k.startswith(is_of_ranks)}
    return {k: v for k, v in found.items() if k not in READ_LATER}


class Server:
    """A process that others are forked from.

    Args:
        also: Modules to import before, in addition to `PRELOADED`.
        environment: Its variables; None for those of this process.
        connection: To such a process; None to start one.
    """

    def __init__(self, also=(), environment=None, connection=None):
        environment = dict(os.environ if environment is None else environment)
        self._lock = threading.Lock()
        self._environment = read_at_start(environment)
        self._path = path_of(environment, Path.cwd())
        self._connection = connection
        self._process = None
        if connection is None and CAN_FORK:
            self._connection, theirs = socket.socketpair()
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), *PRELOADED, *also]
            variables = {k: v for k, v in environment.items() if k not in THREADS}
            with theirs:
                self._process = NewProcess(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=variables)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process is not None:
            # Not only closed: a child that a test has forked may hold it, too.
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._process.wait()

    def popen(self, *args, **options):
        """`subprocess.Popen`, forked from this process."""
        return Popen(*args, server=self, **options)

    def can_start(self, order):
        """Whether a process of it is as a new one would be."""
        environment = order["environment"]
        patterns = ("sitecustomize.py", "usercustomize.py", "*.dist-info")
        if any(any(Path(name).glob(p)) for name in order["path"] if name not in self._path for p in patterns):
            return False  # it may load something
        counts = [environment.get(name, "") for name in THREADS]
        are_usable = counts[1] in ("", counts[0]) and (not counts[0] or counts[0].isdecimal())
        return read_at_start(environment) == self._environment and are_usable

    def run(self, path, *words, **environment):
        """Run a script with one thread; exit status, and what it printed in one text."""
        command = [sys.executable, "-W", "ignore", path, *words]
        return self._completed(command, subprocess.STDOUT, Path.cwd(), environment)

    def try_script(self, path, **environment):
        """Run a script as `shadowrun.repro.script.run_script` does, with its errors apart from what it prints."""
        return self._completed([sys.executable, "-W", "ignore", path], subprocess.PIPE, Path.cwd(), environment)

    def shadowrun(self, words, folder, environment):
        """Run a command of shadowrun with one thread."""
        words = [sys.executable, Path(sys.executable).with_name("shadowrun"), *map(str, words)]
        return self._completed(words, subprocess.PIPE, folder, environment)

    def _completed(self, command, errors, folder, environment):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        pipe = subprocess.PIPE
        process = self.popen(command, stdout=pipe, stderr=errors, text=True, cwd=folder, env=environment)
        with process:
            try:
                out, said = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, said or "")

    def fork(self, order, files):
        """Process id of a new child of this process."""
        text = json.dumps(order).encode()
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            # What outlives a test's processes becomes a child of the system's first process, as ever.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [len(text).to_bytes(8, "little")], files)
                self._connection.sendall(text)
                return int.from_bytes(_read(self._connection, 8), "little")
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def server():
    """The process that all others are forked from, until the tests end."""
    started = Server(environment=BEFORE_TESTS)
    atexit.register(started.__exit__)
    return started


NewProcess = subprocess.Popen
_PARAMETERS = list(inspect.signature(NewProcess._execute_child).parameters)[1:]


class Popen(NewProcess):
    """Forks where a new process of this interpreter would be the same, and otherwise starts a new one."""

    def __init__(self, *args, server=None, **options):
        self._server = server
        super().__init__(*args, **options)

    def _execute_child(self, *given):
        asked = types.SimpleNamespace(**dict(zip(_PARAMETERS, given, strict=True)))
        order = order_of(asked) if CAN_FORK else None
        origin = (self._server or server()) if order else None
        if origin is None or not origin.can_start(order):
            super()._execute_child(*given)
            return
        streams = [asked.p2cread, asked.c2pwrite, asked.errwrite]
        files = [number if own == -1 else own for number, own in enumerate(streams)]
        try:
            self.pid = origin.fork(order, [*files, *asked.pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(
                asked.p2cread, asked.p2cwrite, asked.c2pread, asked.c2pwrite, asked.errread, asked.errwrite
            )


def order_of(asked):
    """What a process of these options does; None for one that is not forked."""
    special = (asked.preexec_fn, asked.gid, asked.gids, asked.uid, asked.shell or None, asked.executable)
    if any(option is not None for option in special) or asked.umask >= 0 or asked.process_group not in (-1, None):
        return None
    if not asked.close_fds or isinstance(asked.args, str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in asked.args]
    if words[0] != sys.executable or not all(isinstance(word, str) for word in words):
        return None
    program = program_of(words[1:])
    folder = str(Path.cwd() if asked.cwd is None else Path(os.fsdecode(asked.cwd)).absolute())
    environment = dict(os.environ if asked.env is None else asked.env)
    if program is None or not Path(folder).is_dir() or any(isinstance(text, bytes) for text in environment):
        return None
    path = [] if program["is_isolated"] else path_of(environment, folder)
    return {
        **program,
        "all_words": words,
        "environment": environment,
        "folder": folder,
        "has_own_session": asked.start_new_session,
        "ignores_sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "is_safe": program["is_safe"] or bool(not program["is_isolated"] and environment.get("PYTHONSAFEPATH")),
        "passed": [int(number) for number in asked.pass_fds],
        "path": path,
    }


def path_of(environment, folder):
    """The folders that a variable adds to the module path."""
    found = environment.get("PYTHONPATH", "")
    names = found.split(os.pathsep) if found else []
    return list(dict.fromkeys(os.path.normpath(Path(folder, name)) for name in names))


def program_of(words):
    """What Python's command line asks for; None for options that a running process cannot take on."""
    found = {"is_isolated": False, "is_safe": False, "is_quiet": False}
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m", "-"):
        option = words.pop(0)
        if option == "-W" and words[:1] == ["ignore"]:
            words.pop(0)
            found["is_quiet"] = True
        elif option in ("-P", "-I"):
            found["is_safe"] = True
            found["is_isolated"] |= option == "-I"
        else:
            return None
    if not words or (words[0] in ("-c", "-m") and len(words) < 2):
        return None
    kind = words.pop(0) if words[0] in ("-c", "-m", "-") else "file"
    text = "" if kind == "-" else words.pop(0)
    return found | {"kind": kind, "text": text, "words": words}


def script(text, *words, **environment):
    """Run a script with one thread; what it printed is one text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text, encoding="utf-8")
        return server().run(path, *words, **environment)


def shadowrun(*words, folder=".", **environment):
    """Run a command of shadowrun with one thread; exit status, standard output and standard error."""
    return server().shadowrun(words, folder, environment)


# ---- the process that others are forked from


def serve(connection):
    """Fork a process for each order, until the other end is closed."""
    while header := _header(connection):
        size, files = header
        order = json.loads(_read(connection, size))
        readable, writable = os.pipe()
        between = os.fork()
        if not between:
            between, child = os.getpid(), os.fork()
            if not child:
                # Where the process between has ended, the one that ordered this one is the parent.
                while os.getppid() == between:
                    os.sched_yield()
                connection.close()
                os.close(readable)
                os.close(writable)
                _live(order, files)
            os.write(writable, child.to_bytes(8, "little"))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(readable, 8))
        for number in (*files, readable, writable):
            os.close(number)
    os._exit(0)


def _header(connection):
    try:
        data, files, *_ = socket.recv_fds(connection, 8, 64)
    except ConnectionError:
        return None
    return (int.from_bytes(data, "little"), files) if data else None


def _read(connection, size):
    pieces = b""
    while len(pieces) < size:
        piece = connection.recv(size - len(pieces))
        if not piece:
            raise EOFError("the process that others are forked from has ended")
        pieces += piece
    return pieces


def _live(order, files):
    """The life of a process: what Python does from its start to its end."""
    status = 70
    try:
        if order["has_own_session"]:
            os.setsid()
        _be_a_server_for_its_own(files)
        _settle(order, files)
        status = _run_main(order)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)  # to take torch down takes a second


def _be_a_server_for_its_own(files):
    """What this process starts is forked from one without its operators and threads."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        for number in (ours.fileno(), *files):
            os.close(number)
        serve(theirs)
    theirs.close()
    server.cache_clear()
    own = Server(connection=ours)
    globals()["server"] = lambda: own
    subprocess.Popen = Popen


def _settle(order, files):
    """Take on what a new process gets from outside."""
    import fcntl  # not for Windows

    numbers = [0, 1, 2, *order["passed"]]
    # None may be overwritten before it is where it belongs.
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, max(numbers) + 1) for number in files]
    for number in files:
        os.close(number)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if order["ignores_sigint"] else signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _stream(number, getattr(sys, name)))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if order["is_quiet"]:
        warnings.simplefilter("ignore")
    sys.orig_argv = order["all_words"]
    sys.path[:] = [*order["path"], *_INSTALLED]
    names = [name for name in dir(sys.flags) if not name.startswith(("_", "n_")) and name not in ("count", "index")]
    told = {"safe_path": order["is_safe"], "isolated": int(order["is_isolated"])}
    sys.flags = types.SimpleNamespace(**{name: getattr(sys.flags, name) for name in names} | told)
    if threads := order["environment"].get(THREADS[0]):
        sys.modules["torch"].set_num_threads(int(threads))


def _stream(number, ours):
    """A standard stream as Python makes it."""
    raw = open(number, "wb" if number else "rb", 0 if ours.write_through else -1, closefd=False)  # noqa: SIM115
    is_by_line = number == 2 or raw.isatty()
    made = io.TextIOWrapper(
        raw, ours.encoding, ours.errors, "\n", line_buffering=is_by_line, write_through=ours.write_through
    )
    made.mode = "w" if number else "r"
    return made


def _run_main(order):
    """Run what the command line says; exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter, __annotations__={})
    try:
        _run(main, order)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()  # closes files of the program
    gc.collect()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 255


def _run(main, order):
    kind, text = order["kind"], order["text"]
    sys.argv = [text if kind == "file" else kind, *order["words"]]
    if not order["is_safe"]:
        first = {"-m": Path.cwd(), "file": Path(text).resolve().parent}
        sys.path.insert(0, str(first.get(kind, "")))
    if kind == "-m":
        runpy._run_module_as_main(text)
    elif kind == "file":
        main.__dict__.update(__file__=text, __loader__=SourceFileLoader("__main__", text))
        exec(compile(Path(text).read_bytes(), text, "exec", dont_inherit=True), main.__dict__)
    else:
        text, name = (sys.stdin.read(), "<stdin>") if kind == "-" else (text, "<string>")
        exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    _INSTALLED = sys.path[len(path_of(os.environ, Path.cwd())) :]
    sys.path.insert(0, str(ROOT))
    for name in ("torch", *sys.argv[2:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
