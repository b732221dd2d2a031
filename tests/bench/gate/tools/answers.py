"""Command lines of tools that are not called, and a repository to call them in."""

import json
from pathlib import Path

NAMES = ("python", "memory")


def option(line, name):
    [value] = [part.partition("=")[2] for part in line if part.startswith(f"{name}=")]
    return value


def write(path, values):
    Path(path).write_text(json.dumps(values))
