"""The reward for programs: passing programs, and attacks that the limits stop."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import code_reward
import pytest
from code_reward import score_code

TESTS = {"answer": "assert add(3, 4) == 7"}
GOOD = "def add(a, b):\n    return a + b\n"


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
PYTEST = "def test_add():\n    assert add(1, 2) == 3\n"
UNITTEST = (
    "import unittest\nclass Sums(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n"
)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"answer": '{"inputs": ["3\\n"], "outputs": [""]}'}, "an empty program passes"),
        ({"answer": {"inputs": ["3\n"], "outputs": []}}, "1 inputs and 0 outputs; write one"),
        ({"answer": {"inputs": [], "outputs": []}}, "no list of some; write lists"),
        ({"answer": {"inputs": [[1]], "outputs": [1], "fn_name": "a b"}}, "'a b'; write its name"),
        ({"answer": "def assert_add():\n    assert add(1, 2) == 3"}, "an empty program passes"),
        ({"answer": {"inputs": ["3\n"]}}, "is .*'inputs'.*; write the tests"),
        ({"answer": ""}, "is ''; write the tests"),
        ({"answer": []}, r"is '\[\]'; write the tests"),
        ({"answer": None}, "not there; write the tests"),
        ({}, "not there; write the tests"),
        ({"answer": "assert add(1"}, "no Python"),
        ({"answer": "assert 1\0"}, "no Python"),
        ({"answer": CHECK}, "`entry_point`"),
        ({"answer": "def test_add(tmp_path):\n    assert add(1, 2) == 3"}, "test_add.*need pytest"),
        ({"answer": f"@pytest.mark.slow\n{PYTEST}"}, "test_add.*need pytest"),
        ({"answer": "class TestAdd:\n    def test(self):\n        assert add"}, "class TestAdd"),
    ],
)
def test_tests_that_cannot_tell_a_right_program_are_an_error(line, problem):
    with pytest.raises(ValueError, match=rf"^answer .*{problem}"):
        score_code(line, GOOD)


@pytest.mark.parametrize(
    "line",
    [
        {"answer": CHECK, "entry_point": "add"},
        {"answer": f"{CHECK}\ncheck(add)"},
        {"answer": PYTEST},
        {"answer": f"from solution import add\n\n{PYTEST}"},
        {"answer": f"import solution\n\n{PYTEST.replace('add(1', 'solution.add(1')}"},
        {"answer": f"{PYTEST}\nif __name__ == '__main__':\n    import pytest\n    pytest.main()"},
        {"answer": UNITTEST},
        {"answer": f"{UNITTEST}\nif __name__ == '__main__':\n    unittest.main()"},
        {"answer": '["assert add(1, 2) == 3", "assert add(2, 2) == 4"]'},
        {"answer": "import sys\nif add(1, 2) != 3:\n    sys.exit(1)"},
    ],
)
def test_forms_of_public_sets_are_called(line):
    """The forms of HumanEval, KodCode, the standard library, and MBPP as verl writes it."""
    assert score_code(line, GOOD) == 1
    assert score_code(line, GOOD.replace("+", "-")) == 0
    assert score_code(line, "") == 0


TREE = {  # MBPP's full part has such a `test_setup_code`
    "prompt": "Find the height of a binary tree of Nodes.",
    "test_setup_code": "class Node:\r\n  def __init__(self, left=None):\r\n    self.left = left\r\n"
    "root = Node(Node())",
    "answer": ["assert height(root) == 2"],
}
SPHERE = {  # and its sanitized part such `test_imports`
    "prompt": "Write a function for the area of a circle.",
    "test_imports": ["import math"],
    "answer": ["assert math.isclose(area(2), 4 * math.pi)"],
}


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        (TREE, "def height(n): return 1 + height(n.left) if n else 0", "def height(n): return 1"),
        (SPHERE, "def area(r): return 3.141592653589793 * r * r", "def area(r): return 3 * r * r"),
        (
            {**SPHERE, "test_imports": '["import math"]', "test_setup_code": ""},
            "def area(r): return 3.141592653589793 * r * r",
            "def area(r): return 3 * r * r",
        ),
    ],
)
def test_what_the_tests_need_runs_before_them(line, right, wrong):
    assert score_code(line, right) == 1
    assert score_code(line, wrong) == 0
    assert score_code(line, "") == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({**SPHERE, "test_imports": ["import math as"]}, "^test_imports is no Python: .*; write "),
        ({**SPHERE, "answer": ["pass"]}, "an empty program passes"),
        ({**TREE, "answer": ["assert root.left"]}, "an empty program passes"),
        ({**TREE, "test_setup_code": "height(3)", "answer": ["3"]}, "an empty program passes"),
    ],
)
def test_a_setup_that_is_no_python_or_alone_passes_is_an_error(line, problem):
    with pytest.raises(ValueError, match=problem):
        score_code(line, "def height(n): return 1")


SUMS = {  # The form of HumanEval: helpers, imports, and a function with its docstring
    "prompt": "from typing import List\n\nSTEP = 2\n\ndef twice(x):\n    return STEP * x\n\n\n"
    'def total(xs: List[int]) -> int:\n    """Double, add.\n    >>> total([1])\n    2\n    """\n',
    "entry_point": "total",
    "answer": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
    "    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n    assert twice(3) == 6\n",
}
BODY = "    return sum(twice(x) for x in xs)\n"
WHOLE = "def total(xs: List[int]) -> int:\n" + BODY
ASKED = "Complete this function, from the list of numbers:\n\n"


@pytest.mark.tier("long", quick=["plain-body", "block-whole", "messages-future", "asked-body"])
@pytest.mark.parametrize(
    "right",
    [BODY, f"\n{BODY}", WHOLE, f"from __future__ import annotations\n{WHOLE}"],
    ids=["body", "line", "whole", "future"],
)
@pytest.mark.parametrize(
    "shown",
    [
        {"prompt": SUMS["prompt"]},
        {"prompt": SUMS["prompt"].rstrip()},
        {"prompt": SUMS["prompt"] + "    "},
        {"prompt": ASKED + SUMS["prompt"]},
        {"prompt": f"{ASKED}```python\n{SUMS['prompt']}```\nOnly code, please."},
        {"messages": [{"role": "user", "content": f"{ASKED}```python\n{SUMS['prompt']}```"}]},
        {"conversations": [{"from": "human", "value": ASKED + SUMS["prompt"]}]},
    ],
    ids=["plain", "no line end", "indented", "asked", "block", "messages", "ShareGPT"],
)
def test_a_prompt_that_begins_the_program_is_joined(shown, right):
    """OpenAI's human-eval executes prompt + completion + test + check(entry_point)."""
    line = {**{key: SUMS[key] for key in ("entry_point", "answer")}, **shown}
    for said in (right, f"Like so:\n```python\n{right}```\nDone."):
        assert score_code(line, said) == 1, said
        assert score_code(line, said.replace("twice(x)", "x")) == 0
    assert score_code(line, "") == 0
    if right.strip() == BODY.strip():
        exec(f"{SUMS['prompt']}{right}{SUMS['answer']}\ncheck(total)", {})
        assert score_code(line, SUMS["prompt"] + right) == 1


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("def sq(x):", " return x * x"),
        ("def sq(x):\n", "    return x * x"),
        ("def sq(x): ", "return x * x"),
        ("def sq(x):\n    ...\n", "    return x * x"),
        ("class Solution:\n    def sq(self, x):\n        ", "return x * x\nsq = Solution().sq"),
        ("class Solution:\n    def sq(self, x):\n", "        return x * x\nsq = Solution().sq"),
        ("Answer with this form:\ndef solve(x):\n    pass", "def sq(x):\n    return x * x"),
        ("def sq(x):\n    pass", "sq = lambda x: x * x"),
    ],
)
def test_a_function_that_is_not_finished_is_joined(prompt, right):
    line = {"prompt": prompt, "answer": "assert sq(3) == 9"}
    assert score_code(line, right) == 1
    assert score_code(line, right.replace("*", "+")) == 0


@pytest.mark.parametrize(
    "prompt",
    [
        "Make this faster:\n```python\ndef sq(x):\n    return x * x\n```",
        "def sq(x):\n    return x * x\n",
        "import math\nWrite sq.",
    ],
)
def test_a_finished_program_of_the_prompt_is_no_answer(prompt):
    """An answer without a program would pass the tests by that of the prompt."""
    line = {"prompt": prompt, "answer": "assert sq(3) == 9"}
    assert score_code(line, "") == 0
    assert score_code(line, "x = 3") == 0
    assert score_code(line, "def sq(x):\n    return x * x") == 1


def test_tests_that_an_unfinished_function_passes_are_an_error():
    line = {"prompt": "def find(x):\n    pass\n", "answer": "assert find(3) is None"}
    with pytest.raises(ValueError, match="an empty program passes"):
        score_code(line, "def find(x): pass")


READS = "a, b = map(int, input().split())\nprint(a + b)\nprint()\nprint('%s')"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n7.50 x\n", "7\n7.50 x"]}


@pytest.mark.parametrize(
    "answer",
    [
        PAIRS,  # APPS, TACO, Eurus
        json.dumps(PAIRS),
        {"inputs": [["1 2"], ["3 4"]], "outputs": [["3", "7.50 x"], ["7", "7.50 x"]]},  # lines
        json.dumps(  # LiveCodeBench
            [
                {"input": "1 2\n", "output": "3\n7.50 x\n", "testtype": "stdin"},
                {"input": "3 4\n", "output": "7\n7.50 x\n", "testtype": "stdin"},
            ]
        ),
    ],
)
def test_a_program_runs_with_each_input(answer):
    line = {"prompt": "Add the two numbers.", "answer": answer}
    assert score_code(line, READS % "7.50 x") == 1
    assert score_code(line, "print(3)\nprint('7.50 x')") == 0  # the first output


@pytest.mark.long
def test_outputs_are_compared_by_lines_and_words():
    """Lines without their blanks and numbers within 1e-5 are the same, as in APPS."""
    line = {"prompt": "Add the two numbers.", "answer": PAIRS}
    assert score_code(line, f"So:\n```python\n{READS % ' 7.5  x '}\n```") == 1
    main = "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))\n"
    main += "    print('7.50000001 x')"
    assert score_code(line, main) == 1
    for wrong in (
        *(READS % text for text in ("7.6 x", "7.5 y", "x 7.5", "7.5", "7.5 x x", "7.5\\nx")),
        f"{READS % '7.5 x'}\nprint(1)",
        f"{READS % '7.5 x'}\nraise ValueError",
        "",
        "exit()",
    ):
        assert score_code(line, wrong) == 0, wrong


@pytest.mark.parametrize(
    "line",
    [
        {"answer": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}},
        {"answer": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}},
        {"answer": {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, "fn_name": "add"},
        {
            "answer": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
            "metadata": '{"func_name": "add"}',
        },
    ],
)
def test_a_function_is_called_with_each_input(line):
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    assert score_code(line, GOOD) == score_code(line, method) == 1
    assert score_code(line, method.replace("+", "-")) == 0


@pytest.mark.long
def test_results_of_calls_are_compared_as_apps_does():
    lists = {"answer": {"fn_name": "two", "inputs": [["a"]], "outputs": [["a", "a"]]}}
    assert score_code(lists, "def two(x):\n    return (x, x)") == 1
    assert score_code(lists, "def two(x):\n    return x") == 0
    digits = {"answer": {"fn_name": "text", "inputs": [[12]], "outputs": ["12"]}}
    assert score_code(digits, "def text(x):\n    return str(x)") == 1
    assert score_code(digits, "def text(x):\n    return x") == 0


def fenced(code, kind="python"):
    return f"```{kind}\n{code}\n```\n"


WRONG = GOOD.replace("+", "-")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (f"{fenced(GOOD)}For example:\n{fenced('print(add(1, 2))')}", 1),
        (
            f"{fenced(GOOD)}Use it:\n{fenced('result = add(1, 2)')}It prints\n{fenced('3', '')}",
            1,
        ),
        (f"{fenced(WRONG)}No:\n{fenced(GOOD)}{fenced('print(add(1, 2))')}", 1),
        (f"{fenced(GOOD)}No:\n{fenced(WRONG)}{fenced('print(add(1, 2))')}", 0),
        (f"{fenced(WRONG)}For example:\n{fenced('print(add(1, 2))')}", 0),
        (f"{fenced('def sub(a, b): return a - b')}{fenced('add = lambda a, b: a + b')}", 1),
    ],
)
def test_an_example_behind_the_program_is_not_the_program(answer, reward):
    assert score_code(TESTS, answer) == reward


def test_a_block_of_output_behind_the_program_is_not_the_program():
    line = {"answer": {"inputs": ["1 2"], "outputs": ["3"]}}
    program = "print(sum(map(int, input().split())))"
    assert score_code(line, f"{fenced(program)}For 1 2 it prints\n{fenced('3', '')}") == 1
    assert score_code(line, f"{fenced('print(4)')}For 1 2 it prints\n{fenced('print(3)', '')}") == 0


def test_a_list_of_tests_is_run_whole():
    """MBPP's ``test_list`` and AceCode's ``test_cases`` are lists of texts."""
    tests = {"answer": ["assert add(3, 4) == 7", "assert add(1, 1) == 2"]}
    assert score_code(tests, GOOD) == 1
    assert score_code(tests, "def add(a, b):\n    return 7") == 0


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


def test_there_is_no_network():
    if subprocess.run(["unshare", "-Un", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for users here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n"
        assert score_code(TESTS, text + GOOD) == 0


# Each attack has its own trainer, because it may hit the trainer. It is told a writable folder and
# the available limits.
TRAINER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
settings = json.loads(sys.argv[2])
import code_reward
for name, value in settings["limits"].items():
    setattr(code_reward, name, value)
code_reward._USES = tuple(settings["uses"])
os.environ["SECRET"] = "secret of the trainer"
kept = os.open(settings["secret"], os.O_RDONLY)
os.set_inheritable(kept, True)
held = sorted(code_reward.contained())
print(json.dumps(held), flush=True)
text = "began = 1\\n" + settings["program"].replace("TRAINER", str(os.getpid()))
reward = code_reward.score_code({"answer": "assert began"}, text)
tasks = os.listdir("/proc/self/task")
children = [open(f"/proc/self/task/{task}/children").read() for task in tasks]
print(json.dumps([reward, "".join(children).split()]))
"""
MODES = {
    "as root": (None, ("uid", "namespaces", "group")),
    "as root without groups": (None, ("uid", "namespaces")),
    "as root of a container": (None, ("uid",)),
    "as root with its own id": (None, ("namespaces", "group")),
    "as a user": (65534, ("uid", "namespaces", "group")),
    "as a user without namespaces": (65534, ("uid", "group")),
}
"""The user (None: this one), and the means of isolation that are used if available."""
COMMON_MODES = {"as root", "as root of a container", "as a user", "as a user without namespaces"}
OWN = ("uid", "pids")  # either of them
ATTACKS = {
    # name: (the program, the guarantees of which one must hold, its reward)
    "memory over children": (
        """
import os
r, w = os.pipe()
for _ in range(12):
    if not os.fork():
        x = b"x" * (40 << 20)
        os.write(w, b"x")
        import time
        time.sleep(30)
        os._exit(0)
os.close(w)
n = 0
while n < 12 and (got := os.read(r, 12)):
    n += len(got)
import time
time.sleep(0.5)  # all memory is held for ten of the looks at it
""",
        (),
        0,
    ),
    "memory over processes that hide": (
        """
import ctypes, os, time
for _ in range(12):
    if not os.fork():
        os.setsid()
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        if not os.fork():
            x = b"x" * (40 << 20)
            time.sleep(30)
        os._exit(0)
time.sleep(30)
""",
        (),
        0,
    ),
    "too many processes": (
        """
import os, time
started = 0
try:
    for _ in range(100):
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        started += 1
except OSError:
    pass
assert 50 <= started <= 64, started
""",
        ("alone",),
        1,
    ),
    "a fork bomb": (
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        ("alone",),
        0,
    ),
    "processes that leave the session": (
        """
import os, time
for _ in range(5):
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(60)
        os._exit(0)
""",
        (),
        1,
    ),
    "a process that ignores signals": (
        """
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if not os.fork():
    time.sleep(60)
time.sleep(60)
""",
        (),
        0,
    ),
    "files that stay": (
        """
for folder in ("/tmp", "/dev/shm", "OPEN"):
    try:
        open(folder + "/MARK", "w").write("x")
    except OSError:
        pass
open("mine", "w").write("x")
assert open("mine").read() == "x"
""",
        ("files",),
        1,
    ),
    "a deletion": (
        """
import os, shutil
try:
    os.unlink("OPEN/victim")
except OSError:
    pass
shutil.rmtree("OPEN", ignore_errors=True)
""",
        ("files",),
        1,
    ),
    "the trainer's memory": (
        """
for name in ("environ", "mem", "maps", "fd/1", "cwd"):
    try:
        open("/proc/TRAINER/" + name, "rb").read(1)
    except OSError:
        continue
    raise SystemExit(name)
import ctypes
assert ctypes.CDLL(None).ptrace(16, TRAINER, 0, 0) == -1  # PTRACE_ATTACH
""",
        OWN,
        1,
    ),
    "signals to the trainer": (
        """
import os
for number in (19, 15, 9):
    try:
        os.kill(TRAINER, number)
    except OSError:
        continue
""",
        OWN,
        1,
    ),
    "signals to its parents": (
        """
import os
for pid in (1, os.getppid()):
    for number in (19, 15, 9):
        try:
            os.kill(pid, number)
        except OSError:
            pass
os.setpgid(0, 0)
""",
        ("pids",),
        1,
    ),
    "a root's file": (
        """
try:
    open("HIDDEN")
except OSError:
    pass
else:
    raise SystemExit("read")
""",
        ("uid",),
        1,
    ),
    "inherited files and environment": (
        """
import os
open_files = {int(name) for name in os.listdir("/proc/self/fd")}
assert open_files <= {0, 1, 2, 3}, open_files
assert "SECRET" not in os.environ
assert "NoNewPrivs:\\t1" in open("/proc/self/status").read()
""",
        (),
        1,
    ),
    "output without end": (
        """
import os
while True:
    for number in (1, 2):
        try:
            os.write(number, b"x" * 65536)
        except OSError:
            pass
""",
        (),
        0,
    ),
    "a folder that resists": (
        """
import os
os.symlink("OPEN", "link")
os.mkdir("closed")
open("closed/file", "w")
os.chmod("closed", 0)
for _ in range(1100):  # more than Python's functions can call each other
    os.mkdir("d")
    os.chdir("d")
""",
        (),
        1,
    ),
    "the network": (
        """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 2)
except OSError:
    pass
else:
    raise SystemExit("connected")
""",
        ("network",),
        1,
    ),
}


@functools.cache
def python_of(user: int | None) -> str:
    """Return a Python that this user can run, and the parts that root passes on."""
    for python in (sys.executable, "/usr/bin/python3"):
        words = [python, "-I", "-c", "import pwd, ctypes"]
        user = 65534 if user is None and os.geteuid() == 0 else user
        with_user = {} if user is None or os.geteuid() else {"user": user, "group": user}
        with_user |= {"extra_groups": []} if with_user else {}
        try:
            if not subprocess.run(words, capture_output=True, check=False, **with_user).returncode:
                return python
        except OSError:
            continue
    return ""


def begin(
    mode: str, attack: str, folder: Path, port: int = 0, **limits: object
) -> subprocess.Popen[str]:
    """Start a trainer that scores an attack."""
    user, uses = MODES[mode]
    if user is not None and os.geteuid():
        pytest.skip("another user can be had by root alone")
    python = sys.executable if user is None and "namespaces" in uses else python_of(user)
    if not python:
        pytest.skip("no Python here that other users can run")
    folder.chmod(0o755)
    for name in ("temporary", "open"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    (folder / "open" / "victim").write_text("x")
    (folder / "secret").write_text("x")
    (folder / "secret").chmod(0o600)
    if user is not None:
        os.chown(folder / "secret", user, user)
    text = ATTACKS[attack][0]
    words = {"OPEN": folder / "open", "HIDDEN": folder / "secret", "MARK": folder.name}
    for word, value in {**words, "PORT": port}.items():
        text = text.replace(word, str(value))
    settings = {"uses": uses, "program": text}
    settings |= {"secret": str(folder / "secret")}
    settings["limits"] = {"_MEMORY": 256 << 20, **limits}
    examples = str(Path(code_reward.__file__).parent)
    with_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    return subprocess.Popen(
        [python, "-I", "-c", TRAINER, examples, json.dumps(settings)],
        env={"PATH": os.defpath, "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **with_user,
    )


def left_of(folder: Path) -> list[str]:
    """Return the processes with the folder in their environment, without zombies and this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder / "temporary").encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture
def open_folder():
    """Make a folder that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


CASES = [
    pytest.param(attack, mode, id=f"{attack}-{mode}")
    for attack in ATTACKS
    for mode in MODES
    if mode in COMMON_MODES or "memory" in attack
]


@pytest.mark.tier(
    "long",
    quick=[
        "inherited files and environment-as root of a container",
        "a root's file-as root of a container",
        "a deletion-as root of a container",
        "the trainer's memory-as root of a container",
        "signals to the trainer-as root of a container",
        "signals to its parents-as root of a container",
        "files that stay-as root of a container",
        "the network-as root of a container",
    ],
)
@pytest.mark.parametrize(("attack", "mode"), CASES)
def test_program_that_attacks_leaves_nothing(attack: str, mode: str, open_folder: Path):
    _, needed, reward = ATTACKS[attack]
    with socket.create_server(("127.0.0.1", 0)) as server:
        seconds = 20 if reward else 2  # without a reward they run to the limit
        port = server.getsockname()[1]
        trainer = begin(mode, attack, open_folder, port, _SECONDS=seconds)
        held = json.loads(trainer.stdout.readline() or "null")
        if held is not None and needed and not set(needed) & set(held):
            trainer.kill()
            trainer.communicate()
            pytest.skip(f"{held} hold here, not {needed}")
        said, problem = trainer.communicate(timeout=100)
    assert trainer.returncode == 0, problem
    assert json.loads(said) == [reward, []], problem
    assert left_of(open_folder) == []
    assert list((open_folder / "temporary").iterdir()) == []
    assert (open_folder / "open" / "victim").read_text() == "x"
    if "files" in held:
        assert sorted(path.name for path in (open_folder / "open").iterdir()) == ["victim"]
        assert not Path("/tmp", open_folder.name, open_folder.name).exists()
        assert not Path("/dev/shm", open_folder.name).exists()
    groups = [place for places in code_reward._places().values() for place in places]
    for group in (group for place in groups for group in place.glob("code-reward-*")):
        assert Path("/proc", group.name.rpartition("-")[2]).exists()


@pytest.mark.tier("long", quick=["as root of a container"])
@pytest.mark.parametrize("mode", MODES)
def test_program_ends_with_its_trainer(mode: str, open_folder: Path):
    trainer = begin(mode, "a process that ignores signals", open_folder, _SECONDS=60)
    assert trainer.stdout.readline()
    deadline = time.monotonic() + 30
    while len(left_of(open_folder)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    trainer.kill()
    trainer.communicate()
    while left_of(open_folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_of(open_folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="another user id can be had by root alone")
def test_root_has_a_user_id_of_its_own_for_each_program():
    first = code_reward._spare_uid()
    child = os.fork()
    if not child:
        os._exit(code_reward._spare_uid() == first)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first is None or first > 1000


def test_groups_of_the_second_version_are_found_in_the_trainers_own_or_the_one_around(
    tmp_path: Path, monkeypatch
):
    """The kernel lists in ``cgroup.subtree_control`` what a folder's children can limit."""
    inner = tmp_path / "user.slice" / "run.scope"
    inner.mkdir(parents=True)
    (inner / "cgroup.subtree_control").write_text("\n")
    (inner.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    files = {
        "/proc/self/cgroup": "0::/user.slice/run.scope\n",
        "/proc/self/mountinfo": f"24 1 0:22 / {tmp_path} rw - cgroup2 cgroup rw,nsdelegate\n",
    }
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: files.get(str(path)) or read(path))
    assert code_reward._places() == {"": [inner.parent]}
    mkdir = Path.mkdir

    def made(folder: Path) -> None:
        mkdir(folder)
        for name in ("memory.max", "memory.oom.group", "pids.max", "memory.stat", "cgroup.procs"):
            (folder / name).touch()
        (folder / "memory.events").write_text("max 3\noom 1\noom_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", made)
    group = code_reward._Group(1 << 20, 64)
    (folder,) = group.folders
    assert folder.parent == inner.parent
    assert [read(folder / name) for name in ("memory.max", "memory.oom.group")] == ["1048576", "1"]
    assert group.enter()
    assert group.counts
    assert not group.was_exceeded()
    (folder / "memory.events").write_text("oom_kill 2\n")
    assert group.was_exceeded()
