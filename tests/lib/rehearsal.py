"""Rehearsal of GPU tests on a machine without a GPU: it checks their settings and names.

A test that needs a GPU is skipped where there is none, so a refactoring that breaks the names of
its cases or one of its settings would go unnoticed. :func:`rehearse` runs the body of such a test
all the same. Engines, trainers and groups of processes are stand-ins: they resolve their settings
and refuse what a rank on an H100 would refuse, and then answer whatever they are asked
(:class:`Anything`). So the body continues with its next runs until it needs something that only a
GPU has. Errors after that point mean nothing, except refused settings and unknown names.

Results of computations are not checked, and kernel tests are not rehearsed: their first tensor is
on the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config, ConfigError
from moetrain.models.transformer import compute_dtype, plan_model

_TESTS = str(Path(__file__).parents[1])
_GPUS = 8
_NAMES = (NameError, ImportError, KeyError, AttributeError)
"""Errors of names; raised in a test's own lines, they are the test's fault."""
_OF_GPUS = ("accelerator", "CUDA", "cuda", "NVIDIA", "triton", "Triton", "Anything")
"""Words of errors that come from the lack of a GPU."""


class Anything:
    """An object that has every attribute, equals every number and can be called in any way."""

    device = torch.device("cuda", 0)
    has_invented = False
    """True: one was iterated, so names may be invented."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        Anything.has_invented = True
        return iter((Anything(), Anything()))

    def __contains__(self, item: object) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __exit__(self, *error: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __len__(self) -> int:
        return 2

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __bool__(self) -> bool:
        return True

    __index__ = __int__


def _give_anything(self: Anything, *args: object) -> Anything:
    return Anything()


_OPERATORS = ("getitem", "enter", "neg", "abs", "add", "radd", "sub", "rsub", "mul", "rmul")
for _name in (*_OPERATORS, "truediv", "rtruediv", "pow", "mod"):
    setattr(Anything, f"__{_name}__", _give_anything)
for _name in ["lt", "le", "gt", "ge"]:
    setattr(Anything, f"__{_name}__", Anything.__eq__)


class Rehearsal:
    """Stand-ins that record resolved runs and faulty settings.

    Attributes: runs: how many runs were resolved. faults: refused settings and unknown names after
    which the body itself continued.
    """

    def __init__(self) -> None:
        self.runs, self.world, self.is_on_gpu = 0, 1, False
        self.faults: list[BaseException] = []

    def resolve(self, config: Config, world: int) -> Any:
        """Refuse settings that ``world`` ranks would refuse; return what a rank would resolve."""
        from moetrain.parallel.world import plan_world
        from moetrain.train.session import resolve_run

        config, arch = resolve_run(config)
        return self.check(config, arch, plan_world(config, arch, world))

    def check(self, config: Config, arch: Any, dims: Any) -> Any:
        from moetrain.train.checks import check_run

        on_cpu = config.train.device == "cpu"
        device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
        config = check_run(config, arch, dims, device)
        plan_model(config, arch, compute_dtype(config, device))
        self.runs, self.is_on_gpu = self.runs + 1, True
        found = Anything()
        found.config, found.arch, found.dims = config, arch, dims
        return found

    # ---- stand-ins -----------------------------------------------------------------------------

    def engine(self, config: Config, arch: Any, world: Any) -> Any:
        return self.check(config, arch, world.dims)

    def run(self, config: Config, *args: Any, **kwargs: Any) -> Any:
        return self.resolve(config, self.world)

    def session(self, config: Config, arch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.join(config, arch)

    def join(self, config: Config, arch: Any) -> Any:
        from moetrain.parallel.world import plan_world

        found = Anything()
        found.dims, found.size = plan_world(config, arch, self.world), self.world
        return found

    def spawn(self, world: int, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """Call ``fn`` as one of the ranks; once for each of several named runs."""
        self.is_on_gpu = True
        runs = next((i for i, x in enumerate(args) if isinstance(x, dict)), None)
        named = (
            [args]
            if runs is None
            else [
                (*args[:runs], {name: words}, *args[runs + 1 :])
                for name, words in args[runs].items()
            ]
        )
        with self.in_world(world):
            for given in named:
                try:
                    fn(*given)
                except BaseException as error:  # noqa: BLE001 - told apart here
                    self.note(error)
        return [Anything() for _ in range(world)]

    @contextmanager
    def in_world(self, world: int) -> Iterator[None]:
        before, self.world = self.world, world
        try:
            yield
        finally:
            self.world = before

    def command(self, words: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Resolve the settings of a command of ours instead of running it."""
        words = [str(word) for word in words]
        if words[:2] != [sys.executable, "-m"] or words[2] not in ("moetrain.train", "moetrain.rl"):
            self.is_on_gpu = True
            return Anything()
        given = words[3:]
        is_source = bool(given) and not given[0].startswith("--") and "=" not in given[0]
        source, overrides = (given[0], given[1:]) if is_source else (None, given)
        config = Config.load(source, overrides)
        nproc = config.launch.nproc
        self.resolve(config, nproc if isinstance(nproc, int) else 1)
        return Anything()

    # ---- what goes wrong -----------------------------------------------------------------------

    def note(self, error: BaseException) -> None:
        """Keep ``error`` if it is meaningful."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, pytest.skip.Exception | pytest.fail.Exception | SystemExit):
            return
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        is_own = innermost.startswith(_TESTS) and innermost != __file__
        lacks_gpu = any(word in str(error) for word in _OF_GPUS)
        is_of_names = isinstance(error, _NAMES) and is_own and not Anything.has_invented
        before = not self.is_on_gpu and not lacks_gpu
        if isinstance(error, ConfigError) or (is_of_names and not lacks_gpu) or before:
            self.faults.append(error)


def rehearse(body: Callable[[], object]) -> int:
    """Run ``body``, a test that needs GPUs, without any; return the number of runs that it would
    make.

    Raises the errors of its settings and names.
    """
    rehearsal, Anything.has_invented = Rehearsal(), False
    with _stand_ins(rehearsal):
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - told apart there
            rehearsal.note(error)
    if rehearsal.faults:
        raise rehearsal.faults[0]
    return rehearsal.runs


@contextmanager
def _stand_ins(rehearsal: Rehearsal) -> Iterator[None]:
    from moetrain.parallel import world as world_module
    from moetrain.rl.loop import RlTrainer
    from moetrain.train import checks
    from moetrain.train.engine import Engine
    from moetrain.train.loop import Trainer
    from moetrain.train.session import Session
    from tests.lib import distributed as spawning

    def tensor(*args: Any, **kwargs: Any) -> Any:
        try:
            return make_tensor(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError, RecursionError):
            return Anything()

    make_tensor = torch.tensor
    # At the first use of a device as a context torch keeps the functions that it applies to. They
    # must not be the stand-ins.
    with torch.device("cpu"):
        make_tensor(0)
    with ExitStack() as stack:
        for cls, stand_in in (
            (Engine, "engine"),
            (Trainer, "run"),
            (RlTrainer, "run"),
            (Session, "session"),
        ):
            begin = _begun_by(getattr(rehearsal, stand_in))
            stack.enter_context(patch.object(cls, "__init__", begin))
        for function, stand_in in (
            (spawning.spawn, rehearsal.spawn),
            (world_module.join_world, rehearsal.join),
        ):
            stack.enter_context(_everywhere(function, stand_in))
        for owner, name, stand_in in (
            (subprocess, "run", rehearsal.command),
            (subprocess, "Popen", rehearsal.command),
            (checks, "c_compiler", lambda: "cc"),
            (checks.cudnn_attention, "require", lambda *_: None),
            (checks.cudnn_attention, "runs", lambda *_: True),
            (torch, "tensor", tensor),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: _GPUS),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_name", lambda *_: "NVIDIA H100"),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "set_device", lambda *_: None),
            (torch.cuda, "set_sync_debug_mode", lambda *_: None),
            (torch.cuda, "get_sync_debug_mode", lambda: 0),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
            (torch.cuda, "memory_allocated", lambda *_: 0),
            (torch.cuda, "max_memory_allocated", lambda *_: 0),
            (dist, "get_world_size", lambda *_: rehearsal.world),
            (dist, "get_rank", lambda *_: 0),
            (dist, "barrier", lambda *_, **__: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(patch.dict(os.environ))
        yield


def _begun_by(make: Callable[..., Any]) -> Callable[..., None]:
    """Return an ``__init__`` that turns an object into the result of ``make``."""

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        made = make(*args, **kwargs)
        self.__class__ = Anything
        self.__dict__.update(made.__dict__)

    return begin


@contextmanager
def _everywhere(function: Any, stand_in: Any) -> Iterator[None]:
    """Replace ``function`` by ``stand_in`` in every module that has imported it by name."""
    found = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
    for module, name in found:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name in found:
            setattr(module, name, function)
