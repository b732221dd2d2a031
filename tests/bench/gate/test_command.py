"""Command lines that print, fail, and stay."""

import sys
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

    @pytest.mark.parametrize("heard", ["SIG_DFL", "SIG_IGN"], ids=["ends when told", "has to be killed"])
    def test_one_that_stays_is_ended_with_what_it_started(self, monkeypatch, tmp_path, heard, ends):
        monkeypatch.setattr(command, "_PATIENCE", 3.0)
        program = (
            "import signal, subprocess, sys\n"
            f"signal.signal(signal.SIGTERM, signal.{heard})\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(tmp_path / 'pids')!r}, 'w').write(str(child.pid))\n"
            "child.wait()"
        )
        with pytest.raises(CommandFailedError, match="took longer than 3 s"):
            self.run(program, seconds=3.0)
        child = int((tmp_path / "pids").read_text())
        assert ends(child)
