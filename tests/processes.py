"""Processes for tests, forked from one that has imported what they would each import.

Importing JAX, Flax and orbax takes two seconds. JAX starts its threads and reads XLA_FLAGS when
it is used first, so a fork of a process that has only imported it is as good as a new one. It reads
the variables JAX_* when it is imported: those of the first process stay.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["flax.linen", "flax.nnx.bridge", "optax", "orbax.checkpoint", "sklearn.datasets", "bridge"]
)


def start(function, *arguments, stdout, stderr=None, cwd=None, env=None):
    """Starts a process that calls a function.

    Args:
      function: a function that can be pickled.
      *arguments: its arguments, likewise.
      stdout: the path of a file for what it prints.
      stderr: the path of another one for its errors; the same one if None.
      cwd: its directory; that of this process if None.
      env: its environment, likewise.

    Returns:
      a `multiprocessing.Process`.
    """
    environment = dict(os.environ if env is None else env)
    place = os.fspath(Path.cwd() if cwd is None else cwd)
    outputs = (os.fspath(stdout), os.fspath(stdout if stderr is None else stderr))
    process = _CONTEXT.Process(
        target=_call, args=(outputs, place, environment, function, arguments)
    )
    process.start()
    return process


def run(function, *arguments, cwd=None, env=None, timeout=120):
    """Calls a function in a process of its own, and returns what `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(function, *arguments, stdout=out, stderr=err, cwd=cwd, env=env)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def run_module(name, *arguments, **options):
    """What `python -m name arguments` does."""
    return run(_module, name, list(map(str, arguments)), **options)


def run_code(code, **options):
    """What `python -c code` does."""
    return run(_code, code, **options)


def _call(outputs, cwd, env, function, arguments):
    for descriptor, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        function(*arguments)
    finally:
        # A process of `multiprocessing` ends without them.
        atexit._run_exitfuncs()


def _module(name, arguments):
    sys.path.insert(0, os.getcwd())
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _code(code):
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-c"]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
