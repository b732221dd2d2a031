"""Command lines that print, fail, and stay."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gate import command
from bench.gate.command import CommandFailedError


class TestCommand:
    def run(self, program, codes=(0,), seconds=30.0):
        return command.run([sys.executable, "-c", program], Path(), seconds=seconds, codes=codes)

    def test_what_it_prints_both_ways(self):
        assert self.run("import sys; print('a'); sys.stdout.flush(); print('b', file=sys.stderr)") == "a\nb\n"

    def test_one_thread_and_no_settings_of_pytest_and_git(self, monkeypatch):
        monkeypatch.setenv("PYTEST_ADDOPTS", "--nonsense")
        monkeypatch.setenv("GIT_DIR", "/nowhere")
        names = "'OMP_NUM_THREADS', 'PYTEST_ADDOPTS', 'GIT_DIR'"
        assert self.run(f"import os; print([os.environ.get(n) for n in ({names})])") == "['1', None, None]\n"

    def test_another_code(self):
        with pytest.raises(CommandFailedError, match="ended with 3: the reason"):
            self.run("import sys; print('the reason'); sys.exit(3)", codes=(0, 1))

    @pytest.mark.parametrize(
        ("heard", "patience"),
        [("SIG_DFL", 20.0), ("SIG_IGN", 1.0)],
        ids=["ends when told", "has to be killed"],
    )
    def test_one_that_stays_is_ended_with_what_it_started(self, monkeypatch, tmp_path, heard, patience, ends):
        monkeypatch.setattr(command, "_PATIENCE", patience)
        written = tmp_path / "pids"

        class Popen(subprocess.Popen):
            """Whose 30 seconds are over as soon as there is something to end."""

            def communicate(self, timeout):
                if timeout == 30.0:
                    while not written.exists():
                        time.sleep(0.01)
                    timeout = 0.01
                return super().communicate(timeout=timeout)

        monkeypatch.setattr(command.subprocess, "Popen", Popen)
        program = (
            "import os, signal, subprocess, sys\n"
            f"signal.signal(signal.SIGTERM, signal.{heard})\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(tmp_path / 'part')!r}, 'w').write(str(child.pid))\n"
            f"os.rename({str(tmp_path / 'part')!r}, {str(written)!r})\n"
            "child.wait()"
        )
        with pytest.raises(CommandFailedError, match="took longer than 30 s"):
            self.run(program, seconds=30.0)
        child = int(written.read_text())
        assert ends(child)
