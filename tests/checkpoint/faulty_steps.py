"""Replaces one checkpoint by another again and again, each time with a fault at another step.

Every system call of Python that changes a directory or brings it to the disk is a step. At step `n`
of try `n` the process is killed, or the call fails. Run by `test_faults.py`, which gives a folder,
two finished checkpoints, and what to do; the outcome of each try is a line of JSON.
"""

import errno
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import jax

from bridge._errors import BridgeError
from bridge.checkpoint import _publish

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link")


class Steps:
    """Counts the steps below a folder, and does something at one of them.

    Attributes:
      taken: what the steps were.
    """

    def __init__(self, folder, number, fault):
        self.taken = []
        self._folder = str(folder)
        self._number = number
        self._fault = fault

    def step(self, name, path):
        if not os.fsdecode(path).startswith(self._folder):
            return
        self.taken.append(name)
        if len(self.taken) == self._number:
            if self._fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fsdecode(path))

    def audit(self, event, arguments):
        """The hook that Python calls before each of its system calls."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | Path) and flags & (os.O_WRONLY | os.O_RDWR):
                self.step(event, path)
        elif event in CHANGES:
            # Removing a tree works with names in open directories.
            path = arguments[0]
            self.step(event, path if os.path.isabs(path) else self._folder)

    def install(self):
        """Makes this process take these steps."""
        sync = os.fsync

        def synced(descriptor):
            self.step("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = synced
        sys.addaudithook(self.audit)


def copy(source, target):
    """Copies a directory; of several problems `shutil.copytree` makes an error of its own."""
    target.mkdir()
    for child in source.iterdir():
        if child.is_dir():
            copy(child, target / child.name)
        else:
            (target / child.name).write_bytes(child.read_bytes())


def attempt(place, new, number, fault):
    """What one try reports; it ends a process of its own."""
    steps = Steps(place, number, fault)
    steps.install()
    error = None
    try:
        with _publish.publishing(place / "model", overwrite=True) as target:
            copy(new, Path(os.fspath(target)))
    except BridgeError as caught:
        error = ["BridgeError", str(caught)]
    except BaseException as caught:
        error = [type(caught).__name__, str(caught)]
    steps._number = 0
    return {"steps": steps.taken, "error": error}


def main(folder, old, new, fault, is_there):
    """Tries every step until a try has no more of them."""
    # The processes that are forked have no threads yet.
    warnings.simplefilter("ignore")
    jax.process_index, jax.process_count = lambda: 0, lambda: 1
    number, is_over = 0, False
    while not is_over:
        number += 1
        place = folder / str(number)
        place.mkdir()
        if is_there:
            shutil.copytree(old, place / "model")
        reader, writer = os.pipe()
        if os.fork() == 0:
            outcome = attempt(place, new, number, fault)
            os.write(writer, json.dumps(outcome).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found = json.loads(pipe.read() or "null")
        os.wait()
        # Without the pipe's end it was killed.
        is_over = found is not None and len(found["steps"]) < number
        if not is_over:
            sys.stdout.write(json.dumps({"place": str(place), "outcome": found}) + "\n")
