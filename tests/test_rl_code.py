"""The reward for programs: what passes, and what limits stop."""

import socket
import subprocess
import time

import code_reward
import pytest
from code_reward import score_code

TESTS = {"answer": "assert add(3, 4) == 7"}
GOOD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (GOOD, 1),
        (f"Like so:\n```python\nx\n```\nor\n```python\n{GOOD}```\nDone.", 1),
        (f"```\n{GOOD}```", 1),
        (f"```bash\nls\n```\n```Python3\n{GOOD}```\n```text\nno\n```", 1),
        ("import os\nos.kill(os.getppid(), 9)", 0),
        (GOOD.replace("+", "-"), 0),
        ("", 0),
        ("\0\ud800", 0),
        ("import os\nos._exit(0)", 0),
        ("raise SystemExit(0)", 0),
        (GOOD + "x = bytearray(2 << 30)", 0),
        (GOOD + "open('x', 'wb').write(bytes(2 << 20))", 0),
        (GOOD + "open('x', 'wb').write(bytes(2 << 10))", 1),
        (GOOD + "print('x' * (2 << 20))", 0),
        (GOOD + "import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", 0),
    ],
)
def test_programs_are_scored_by_their_tests(answer, reward):
    assert score_code(TESTS, answer) == reward


def test_a_program_ends_with_all_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(code_reward, "_SECONDS", 1)
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    text = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    started = time.monotonic()
    assert score_code(TESTS, f"{text}time.sleep(99)") == 0
    assert time.monotonic() - started < 5
    time.sleep(3)
    assert not mark.exists()


def test_there_is_no_network():
    if subprocess.run(["unshare", "-Un", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for users here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n"
        assert score_code(TESTS, text + GOOD) == 0
