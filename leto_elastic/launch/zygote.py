"""The zygote: a process that has imported torch and friends, and forks every worker of its agent.

What it guarantees: it starts no thread of its own and touches no device before a fork, so a forked worker is as good as
a new interpreter, minus the seconds of imports and minus the memory of them. A worker is forked twice, so that it is
reparented to the agent (a child subreaper), which then sees its exit like that of any child; the kernel kills it when
the agent dies.

How a worker ends: `serve` *returns* in it, and the script runs from the bottom of the stack. So exceptions, exit codes,
`atexit` and the wait for non-daemon threads are the interpreter's own, as under `python script.py`.

Rejected: `clone(CLONE_PARENT)`, which needs no second fork, but skips glibc's and Python's own work after a fork;
`multiprocessing`'s forkserver, whose children never become the agent's and whose resource tracker unlinks shared memory
of the dead.

It is started by `python -u -c BOOT fd imports padding`, not by `-m`, which would put the current directory in front of
the import path before anything is imported. The padding is room for the command lines of the workers.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import runpy
import signal
import socket
import sys
import types
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path

from leto_elastic.launch import tripwire
from leto_elastic.launch.forking import READY, Start, Started, receive_start, send_started
from leto_elastic.launch.posix import die_with_parent, retitle

BOOT = "import sys; sys.flags.safe_path or sys.path.pop(0); from leto_elastic.launch.zygote import main; main()"

PADDING = 4096

IMPORTS = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes as long as torch itself
    "torch.optim",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.elastic.multiprocessing.errors",
    "leto_elastic.worker.*",
)


def main() -> None:
    """Import, serve, and (in a worker) run the script."""
    agent = os.getppid()
    die_with_parent(agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    for name in sys.argv[2].split(",") if sys.argv[2] else ():
        _import(name)
    gc.collect()
    gc.freeze()
    send_started(sock, Started(READY, os.getpid()))
    start = _serve(sock, agent)
    if start is None:
        os._exit(0)
    _run(start)


def _import(name: str) -> None:
    """Import a module; `package.*` means the package and all modules in it."""
    package = name.removesuffix(".*")
    module = importlib.import_module(package)
    if package != name:
        for found in pkgutil.iter_modules(module.__path__, f"{package}."):
            importlib.import_module(found.name)


def _serve(sock: socket.socket, agent: int) -> Start | None:
    """Fork one worker per request. Returns its request in a worker, None in the zygote when the agent is gone."""
    while True:
        try:
            start, *fds = receive_start(sock)
        except (EOFError, ConnectionResetError):
            return None
        read, write = os.pipe()
        middle = _fork()
        if middle == 0:
            os.close(read)
            between = os.getpid()
            _fork_from_between(write)
            sock.close()
            _become_worker(start, agent, between, fds)
            os.close(write)  # the zygote waits for this before it answers
            return start
        for fd in (write, *fds):
            os.close(fd)
        with open(read, "rb") as pipe:  # noqa: PTH123  (a descriptor)
            told = pipe.read()
        os.waitpid(middle, 0)
        if told:
            send_started(sock, Started(start.number, int(told)))
        else:
            send_started(sock, Started(start.number, 0, "fork failed: too many processes, or too little memory"))


def _fork() -> int:
    with warnings.catch_warnings():  # BLAS may have made threads at import, which it takes care of at a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_from_between(write: int) -> None:
    """In the process between: fork the worker, tell its pid and end. Returns in the worker only."""
    try:
        pid = _fork()
        if pid == 0:
            return
        os.write(write, str(pid).encode())
    except OSError:
        os._exit(1)
    os._exit(0)


def _become_worker(start: Start, agent: int, between: int, fds: list[int]) -> None:
    """Everything of the process that `fork` and `exec` would have set up for a new one."""
    stdout, stderr, wire = fds
    while os.getppid() == between:
        os.sched_yield()  # the process between is on its way out
    die_with_parent(agent)
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    if start.kind == "exec":
        os.close(wire)
    else:
        tripwire.arm(wire)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    if start.nice:
        os.nice(start.nice)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(start: Start) -> None:
    if start.kind == "exec":
        _exec(start)
    flags = ["-u", "-m"] if start.kind == "module" else ["-u"]
    sys.orig_argv = [sys.executable, *flags, *start.argv]
    retitle(sys.orig_argv)
    sys.excepthook = _print_uncaught
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    if start.kind == "module":
        _path_first(str(Path.cwd()))
        sys.argv = ["-m", *start.argv[1:]]
        runpy._run_module_as_main(start.argv[0])  # type: ignore[attr-defined]  # what `python -m` calls
    else:
        _run_script(main_module, start.argv)


def _exec(start: Start) -> None:
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvpe(start.argv[0], start.argv, start.env)  # noqa: S606  (the user's own program)
    except OSError as error:
        print(f"leto: error: cannot start {start.argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def _path_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _run_script(main_module: types.ModuleType, argv: list[str]) -> None:
    path = argv[0]
    sys.argv = list(argv)
    if Path(path).is_dir() or path.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(path, run_name="__main__")
        return
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {reason}", file=sys.stderr)  # noqa: PTH100
        sys.exit(2)
    _path_first(str(Path(path).resolve().parent))
    main_module.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102  (what `python script.py` does)


def _print_uncaught(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
    """As the interpreter prints it, without the frames of this module below the script's."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<string>"):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, value.with_traceback(traceback), traceback)
