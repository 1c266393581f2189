"""Helpers of tests/cli/test_launch.py that other tests use too."""

import os
import sys

from moetrain.cli import launch
from tests.lib import forked_python
from tests.lib.distributed import fork_server


class Launcher:
    """A process that starts ranks, forked to spare it the import of torch."""

    def __init__(self, folder, script, *words, nproc=3):
        (folder / "rank.py").write_text(script)
        self.texts = [folder / name for name in ("stdout", "stderr")]
        command = [str(folder / "rank.py"), *words]
        args = (command, nproc, self.texts)
        self.process = fork_server().Process(target=_launch, args=args)
        self.process.start()

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def end(self, timeout=90):
        """Wait for its end; return its exit code and output."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.process.kill()  # it did not end in time
        return code, *(path.read_text() for path in self.texts)


def _launch(command, nproc, texts):
    for fd, path in enumerate(texts, start=1):  # several processes append to these files
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forked_python.install(is_forked=True)
    launch._GRACE_SECONDS = 2.0
    sys.exit(launch.start_ranks(command, nproc))
