"""Shared fixtures: a tiny configuration that trains in a second on a CPU.

Without a GPU, kernels that a test asks for by name run in Triton's interpreter.
"""

import functools
import gc
import hashlib
import importlib
import itertools
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

# Processes that tests start inherit these variables. Tests are many processes that compute little:
# threads only compete, and a pool of compilers takes longer to start than the work that it would
# do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Without this, each process that compiles spends two seconds on probing the processor's instruction
# sets.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

from tests.lib.marks import TEXTS, may_have

if TYPE_CHECKING:
    from moetrain.config import Config

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # The tests were started behind a shell's "&". Their children would inherit the ignored Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # imports and collection make no garbage


def pytest_collectstart():
    """Prepare this process before a test is imported; xdist's controller imports none."""
    _begin()


def keep_frozen():
    """Keep frozen objects frozen, and freeze no more, whatever runs in this process.

    A run ends with `gc.unfreeze`. Each later collection would scan a million objects of the
    libraries, which took a sixth of the tests' time.
    """
    gc.freeze = gc.unfreeze = lambda: None


@functools.cache
def _begin():
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        with suppress(ModuleNotFoundError):  # Triton is not installed
            importlib.import_module("tests.lib.quick_interpreter")
    importlib.import_module("tests.lib.forked_python").install()
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """Skip files without a GPU test, or without a test of the tier, where only those run."""
    if collection_path.suffix != ".py" or config.args != config.getini("testpaths"):
        return None
    for mark in TEXTS:
        if config.option.markexpr.startswith(mark):
            return None if may_have(mark, collection_path) else True
    return None


def check_texts(items) -> None:
    """Raise UsageError if a test has a mark that a run of this mark would not find."""
    for path, mark in {
        (i.path, mark) for i in items for mark in TEXTS if i.get_closest_marker(mark)
    }:
        if not may_have(mark, path):
            raise pytest.UsageError(
                f"{path} has tests marked {mark}, but its text does not show it: add what gives "
                "them the mark to TEXTS in tests/lib/marks.py"
            )


def tier_of(item) -> str:
    """Return ``quick``, ``long`` or ``wide`` by the mark ``tier`` of the test or of its case."""
    mark = item.get_closest_marker("tier")
    if mark is None:
        return "quick"
    case = item.callspec.id if hasattr(item, "callspec") else ""
    named = (tier for tier, cases in mark.kwargs.items() if any(is_named(case, c) for c in cases))
    return next(named, mark.args[0])


def is_named(case: str, name: str) -> bool:
    """Return True if a mark's ``name`` is that of a case; "..." at its end matches any rest."""
    return case.startswith(name[:-3]) if name.endswith("...") else case == name


def check_tiers(items) -> None:
    """Raise UsageError if a mark ``tier`` names an unknown case."""
    cases: dict[str, set[str]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], set()).add(
            item.callspec.id if hasattr(item, "callspec") else ""
        )
    for item in items:
        mark = item.get_closest_marker("tier")
        test = item.nodeid.partition("[")[0]
        for name in [name for names in mark.kwargs.values() for name in names] if mark else []:
            if not any(is_named(case, name) for case in cases[test]):
                raise pytest.UsageError(f"mark tier of {test}: it has no case {name!r}")


def gpus_needed(item) -> int:
    """Return the number of CUDA devices that a test needs; 0 without the mark ``gpu``."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return 0
    count = mark.args[0] if mark.args else 1
    return item.callspec.params[count] if isinstance(count, str) else count


def packages_of(paths) -> list[str]:
    """Return the packages of files, each once, in the order of the files.

    ``moetrain/data/x.py`` and ``tests/data/x.py`` are of data.
    """
    parts = [path.split("/") for path in paths]
    found = [part[1] for part in parts if part[0] in ("moetrain", "tests") and len(part) > 2]
    return [*dict.fromkeys(found)]


def in_turns(files, changed, seed):
    """Return test files in the order in which a gate runs those that may not all have time.

    By turns comes the next file of the ``changed`` packages, in their order, and the next of all
    files in an order that ``seed`` decides. So each gate runs the tests of what is new, and others
    than the gate before, even if every package has changed. ``files`` are paths from the root.
    """
    by_chance = sorted(files, key=lambda file: hashlib.sha256(f"{seed}{file}".encode()).digest())
    packages = {file: file.split("/")[1] for file in files}
    new = [file for package in changed for file in by_chance if packages[file] == package]
    turns = itertools.chain.from_iterable(itertools.zip_longest(new, by_chance))
    return [file for file in dict.fromkeys(turns) if file is not None]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config, items):
    import torch

    for item in items:
        if (tier := tier_of(item)) != "quick":
            item.add_marker(tier)
    if not any("::" in argument for argument in config.args):
        check_tiers(items)
    check_texts(items)

    if config.option.markexpr in ("long", "wide") and "TESTS_ORDER" in os.environ:
        changed = packages_of(os.environ.get("CHANGED_FILES", "").split())
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
        order = in_turns([*files], changed, os.environ["TESTS_ORDER"])
        places = {file: place for place, file in enumerate(order)}
        items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])

    present = torch.cuda.device_count()
    for item in items:
        needed = gpus_needed(item)
        if needed > 1:
            item.add_marker("several_gpus")
        if needed > present > 0:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices"))


def pytest_runtest_setup(item):
    """Skip the remaining tests after the gate's time, so that the summary counts them."""
    end = float(os.environ.get("TESTS_END_AT", "inf"))
    if time.time() > end:
        pytest.skip("the gate's time is over: this test was not run")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Rehearse the tests that need a GPU where there is none, then skip them."""
    if "gpu" not in pyfuncitem.keywords:
        return None
    import torch

    if torch.cuda.is_available():
        return None
    from tests.lib.rehearsal import rehearse

    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    runs = rehearse(lambda: pyfuncitem.obj(**given))
    pytest.skip(f"needs a CUDA device; the settings of {runs} runs are right")


def pytest_collection_finish():
    """Exclude the collected tests from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    keep_frozen()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Write a folder of text files, enough for a few dozen rows of 32 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the cat sat on a mat. " * (i + 1))
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    """Return one token cache for the whole session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny_words(corpus, token_cache, tmp_path):
    """Return the settings of a tiny run over ``corpus`` into ``tmp_path / "out"``."""
    settings = {
        "model.hidden_size": 16,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 8,
        "model.num_experts": 4,
        "model.moe_intermediate_size": 8,
        "data.source": "text",
        "data.path": corpus,
        "data.cache_dir": token_cache,
        "data.eval_fraction": 0.2,
        "data.seq_len": 32,
        "train.steps": 4,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 4,
        "train.eval_interval": 0,
        "train.eval_rows": 4,
        "train.sample_tokens": 4,
        "train.device": "cpu",
        "compile.enabled": "no",
        "optim.warmup_steps": 2,
        "log.interval": 1,
        "log.tensorboard": "false",
        "output_dir": tmp_path / "out",
    }
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def tiny(tiny_words):
    """Return ``tiny("train.steps=2", ...)``, which makes the tiny run's Config with overrides."""
    from moetrain.config import Config

    def make(*overrides: str) -> "Config":
        return Config.load(None, [*tiny_words, *overrides], environ={})

    return make
