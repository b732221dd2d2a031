"""The system's Chromium, for tests and screenshots."""

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium():
    """Return the path of the system's Chromium, or None. STACKWISE_CHROMIUM names another one."""
    return os.environ.get("STACKWISE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def launch(playwright):
    """Return a running browser. Playwright starts it without a sandbox; containers have a small /dev/shm."""
    return playwright.chromium.launch(executable_path=find_chromium(), args=["--disable-dev-shm-usage"])
