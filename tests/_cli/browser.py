"""Opens a page in headless Chromium, as a user's browser would show it."""

import os
import re
import shutil
import subprocess

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless",
    # CI runs as root in a container.
    "--no-sandbox",
    "--disable-gpu",
    # A container's /dev/shm is small.
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
DARK = ("--blink-settings=preferredColorScheme=0",)
LIGHT = ("--blink-settings=preferredColorScheme=1",)


def find():
    """The browser. Without one the test is skipped, but not in CI, which installs it."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"CI has to have a browser, one of {', '.join(_NAMES)}")
    if found is None:
        pytest.skip(f"no browser here, none of {', '.join(_NAMES)}")
    return found


def start(page, profile, *options):
    """Opens a page and returns (stdout, the messages in the console)."""
    command = [find(), *_OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr)
