"""Compilation ahead: a fake step launches the kernels of a real step to compile them."""

import inspect
import subprocess
import sys
import sysconfig
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from moetrain.kernels.norm.rms_norm import rms_norm
from moetrain.kernels.quant.groups import QUANT_FORMATS, _table
from moetrain.runtime import ahead
from moetrain.runtime.backend import TensorDescriptor, triton
from moetrain.train.fake_step import FakeStep
from tests.lib.distributed import spawn
from tests.lib.engines import DENSE, make_batches, make_engine, objective_of

CASES = {
    "moe": [],
    "dense": [],
    "fp8": ["kernels.precision=fp8", "model.hidden_size=32", "model.moe_intermediate_size=16"],
    "fp8_gradients": [
        *("kernels.precision=fp8_gradients", "model.hidden_size=32"),
        "model.moe_intermediate_size=16",
    ],
    "fp8_blocks": [
        *("kernels.precision=fp8_blocks", "model.hidden_size=32"),
        "model.moe_intermediate_size=128",
    ],
    "adapters": ["lora.rank=8", "moe.bias_update_rate=0"],
    "muon": ["optim.name=muon"],
    "muon bf16": [
        "optim.name=muon",
        "optim.state_dtype=bfloat16",
        "optim.gradient_dtype=bfloat16",
        "train.dtype=bfloat16",
        "moe.z_loss_coef=0",
    ],
    "bf16": ["train.dtype=bfloat16", "moe.z_loss_coef=0", "activation.policy=full"],
    "float8": ["optim.state_dtype=float8", "train.dtype=bfloat16", "moe.z_loss_coef=0"],
    "float8 bf16": [
        "optim.state_dtype=float8",
        "optim.weight_dtype=bfloat16",
        "optim.gradient_dtype=bfloat16",
        "train.dtype=bfloat16",
        "moe.z_loss_coef=0",
    ],
    "balanced": ["moe.force_balanced=yes", "moe.bias_update_rate=0"],
}


def kind(value):
    """Return the type by which a kernel is compiled, for an argument."""
    if isinstance(value, TensorDescriptor):
        return ("descriptor", kind(value.base), tuple(value.block_shape))
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else "int"  # divisibility by 16 depends on the size of a case
    return getattr(value, "dtype", None) or type(value).__name__


def signature(kernel, args, settings):
    """Return the signature that :class:`Launches` compiles a kernel for."""
    hints = kernel.fn.__annotations__
    kinds = [
        value if "constexpr" in str(hints.get(name)) else kind(value)
        for name, value in zip(inspect.signature(kernel.fn).parameters, args, strict=False)
    ]
    return kernel.fn.__qualname__, tuple(kinds), tuple(sorted(settings.items(), key=str))


def launched_in(run):
    """Return the signatures that ``run`` launches."""
    found, kinds = set(), triton.runtime.jit.KernelInterface
    original = kinds.__getitem__

    def at(kernel, grid):
        def launch(*args, **settings):
            found.add(signature(kernel, args, settings))
            return original(kernel, grid)(*args, **settings)

        return launch

    with patch.object(kinds, "__getitem__", at):
        run()
    return found


ONE_LAYER = ["kernels.backend=triton", "compile.enabled=no", "model.num_layers=1"]


def as_on_a_gpu(monkeypatch):
    """Let kernels without a setting be launched too."""
    for kernel in ("adamw", "adamw_float8", "muon", "reduction"):
        monkeypatch.setattr(
            sys.modules[f"moetrain.kernels.optim.{kernel}"],
            "use_fast",
            lambda backend, tensor: True,
        )


def launches_of_fake_step(engine):
    launches = ahead.launches_of(FakeStep.of(engine.config, engine.arch, engine.world).run)
    return {signature(kernel, *one) for kernel, all in launches.items() for one in all}


def step(engine):
    batches = make_batches(0, engine.config.train.micro_batch_size)
    engine.forward_backward(batches[:1], objective_of(engine))
    engine.step(1e-2)


@pytest.mark.tier("long", quick=["muon"], wide=["fp8"])
@pytest.mark.parametrize("case", CASES)
def test_a_fake_step_launches_what_a_step_does(case, monkeypatch):
    as_on_a_gpu(monkeypatch)
    base = {"base": DENSE} if case == "dense" else {}
    engine = make_engine(*ONE_LAYER, *CASES[case], "train.global_batch_size=1", micro=1, **base)
    before, random = {name: x.clone() for name, x in engine.weights()}, torch.get_rng_state()
    found = launches_of_fake_step(engine)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, before[name]) for name, x in engine.weights())
    assert found
    assert launched_in(lambda: step(engine)) == found


MESHES = {
    "copies": ["parallel.fsdp_transport=copy"],
    "tokens sent, gradients once": ["parallel.ep=2", "parallel.reduce_at=last"],
}


INDICES = {"_count_kernel", "_rank_kernel"}


def steps_on_ranks(cases):
    """Return for each case the launches of a fake step, and of two micro-batches and an update."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        return {name: faked_and_launched(words) for name, words in cases.items()}


def faked_and_launched(words):
    engine = make_engine(*ONE_LAYER, "train.global_batch_size=4", *words, micro=1)
    found = launches_of_fake_step(engine)
    batches = make_batches(0, 1)[:2]
    objective = objective_of(engine)

    def run():
        engine.forward_backward(batches, objective)
        engine.step(1e-2)

    return found, launched_in(run)


@pytest.mark.tier("long")
def test_a_fake_step_launches_what_ranks_do():
    """Dispatch's indices are excluded: they are compiled for a number of experts, or of ranks."""
    for answers in spawn(2, steps_on_ranks, MESHES, timeout=100):
        for name, (found, launched) in answers.items():
            different = {one for one in found ^ launched if one[0] not in INDICES}
            assert not different, (name, found & different, launched & different)
            assert bool(found ^ launched) == ("sent" in name)


def test_what_has_memory_is_launched_meanwhile():
    x, weight, found = torch.randn(3, 8), torch.ones(8), {}
    expected = rms_norm(x, weight, 1e-6, backend="triton")
    with ahead._caught(found):
        assert torch.equal(rms_norm(x, weight, 1e-6, backend="triton"), expected)
    assert not found


def test_a_fake_step_leaves_no_tables_without_memory():
    """Real steps would take such tables for their own, and their kernels would then do nothing."""
    _table.cache_clear()
    ahead.launches_of(lambda: [form.table(torch.device("cpu")) for form in QUANT_FORMATS.values()])
    for name, form in QUANT_FORMATS.items():
        table = form.table(torch.device("cpu"))
        assert (table is None) == (name == "float8")
        assert type(table) in (torch.Tensor, type(None)), name
        assert form.table(torch.device("cpu")) is table


def test_a_fake_step_executes_no_plan_of_a_library():
    found = []

    def fake_step():
        q, k = (torch.empty(32, heads, 64, device="cuda").bfloat16() for heads in (4, 2))
        ends = torch.empty(3, device="cuda", dtype=torch.int32)
        out, lse = torch.ops.moetrain.attention_packed(q, k, k, ends, None, 16, None, 0.25, True)
        saved = (out, q, k, k, out, lse, ends, None)
        found.extend(torch.ops.moetrain.attention_packed_backward(*saved, 16, None, 0.25, False))

    launched = ahead.launches_of(fake_step)
    assert [kernel.fn.__name__ for kernel in launched] == ["_attend_kernel"]
    assert [tuple(x.shape) for x in found] == [(32, 4, 64), (32, 2, 64), (32, 2, 64)]


def test_a_fake_step_launches_the_kernels_of_gpt_oss():
    def fake_step():
        how = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = (torch.empty(32, heads, 64, **how) for heads in (4, 2))
        ends = torch.empty(3, device="cuda", dtype=torch.int32)
        sinks = torch.empty(4, device="cuda")
        torch.ops.moetrain.attention_with_sinks(q, k, k, sinks, ends, None, 16, None, 0.25, True)
        x, slots = torch.empty(9, 16, **how), torch.empty(9, 2, device="cuda", dtype=torch.int32)
        shapes = (3, 16, 16), (3, 16), (3, 16, 8), (3, 16)
        matrices = [torch.empty(shape, **how) for shape in shapes]
        routing = slots.float(), slots, ends
        torch.ops.moetrain.clamped_expert_mlp(x, *routing, matrices, [], 7.0, 1.7, 1.0, "bf16", 18)

    kernels = [kernel.fn.__name__ for kernel in ahead.launches_of(fake_step)]
    assert kernels == ["_attend_kernel", "_copy_kernel", "_forward_kernel", "_sum_kernel"]


LAUNCHER = r"""
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def test_a_kernel_keeps_its_launcher_while_others_load_theirs(tmp_path):
    """Triton's compiled modules of launchers, all of one name, loaded by its own function."""
    paths = []
    for number in (1, 2):
        paths.append(
            tmp_path / str(number) / f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
        )
        paths[-1].parent.mkdir()
        source = paths[-1].with_suffix(".c")
        source.write_text(LAUNCHER.replace("NUMBER", str(number)))
        words = ["cc", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}"]
        subprocess.run([*words, str(source), "-o", str(paths[-1])], check=True)
    load = triton.runtime.build._load_module_from_path
    first, second, again = (load("__triton_launcher", str(paths[i])) for i in (0, 1, 0))
    assert [module.launch() for module in (first, second, again)] == [1, 2, 1]


class Kernel:
    """A kernel whose compilation fails, or is recorded."""

    def __init__(self, seen, fails):
        self.seen, self.fails = seen, fails

    src, metadata = "a signature", "settings"

    def warmup(self, *args, grid, **settings):
        if self.fails:
            raise RuntimeError("no such register")
        self.seen.append((args, settings))
        return self

    @property
    def run(self):
        raise AssertionError("a thread that launches may find the function without its kernel")


@pytest.fixture
def launchers(monkeypatch):
    """Let compilation ahead run without a device; return what launchers were made of."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made = []
    driver = SimpleNamespace(launcher_cls=lambda *made_of: made.append(made_of))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return made


def test_a_failure_is_said_and_ends_nothing(launchers, caplog):
    seen = []
    launches = {Kernel(seen, True): [((1,), {})], Kernel(seen, False): [((2,), {"D": 8})] * 2}
    futures = ahead.compile_ahead(launches, torch.device("cuda", 0))
    assert isinstance(futures[0].exception(), RuntimeError)
    assert futures[1].result() is None
    assert seen == [((2,), {"D": 8})] * 2
    assert launchers == [("a signature", "settings")] * 2
    assert "could not be compiled ahead of its launch: no such register" in caplog.text


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_of_a_machine_share_the_work(size, launchers):
    for rank in range(size):
        seen = []
        launches = {Kernel(seen, False): [((number,), {})] for number in range(21)}
        for future in ahead.compile_ahead(launches, torch.device("cuda", 0), rank, size):
            future.result(10)
        numbers = [args[0] for args, _ in seen]
        own = range(rank, 21, size)
        assert sorted(numbers) == list(range(21))
        assert set(numbers[: len(own)]) == set(own)


def test_a_fake_step_that_fails_is_said_and_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr("moetrain.train.fake_step.can_compile_ahead", lambda device: True)
    monkeypatch.setattr(FakeStep, "of", lambda *args: 1 / 0)
    step(make_engine())
    assert "each is compiled at its first launch: division by zero" in caplog.text


def test_the_compiler_is_there_when_ranks_have_met(monkeypatch, caplog):
    started = []
    monkeypatch.setattr(
        "torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(sys.modules.keys())
    )
    with ahead.compiler_started(torch.device("cpu")):
        pass
    assert not caplog.text
    (modules,) = started
    assert set(ahead._COMPILER) <= modules
    monkeypatch.setattr(ahead, "_COMPILER", ("no_such_compiler",))
    with ahead.compiler_started(torch.device("cpu")):
        pass
    assert "ahead of its first use: No module named 'no_such_compiler'" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_fake_step_launches_what_a_step_on_a_gpu_does(case):
    words = ["train.device=cuda", "model.hidden_size=128", "model.head_dim=32"]
    if case != "dense":
        words.append("model.moe_intermediate_size=64")
    base = {"base": DENSE} if case == "dense" else {}
    own = [*CASES[case], "compile.enabled=no", "train.global_batch_size=8"]
    engine = make_engine(*words, *own, **base)
    found = launches_of_fake_step(engine)
    launched = launched_in(lambda: step(engine))
    # Attention's library launches it.
    assert {one for one in launched if one[0] != "_layout_kernel"} <= found
