"""``activation.offload``: same bits, less memory, pages used again, nothing left behind."""

import gc
import re
from contextlib import contextmanager

import pytest
import torch
from distributed import spawn
from estimates import estimate_memory
from test_activation import GPU, Watch, train
from test_compile import MOE, batch, compile_counting, fresh_model
from torch._dynamo.utils import counters

from moetrain.cli.train import main
from moetrain.config import ActivationSection, Config, ConfigError, KernelsSection, MoeSection
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.transformer import Transformer, compile_blocks
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.offload import activations as activation_offload
from moetrain.parallel.offload.activations import (
    ActivationOffload,
    _HostCopy,
    _HostPages,
    _stays,
)

CPU = torch.device("cpu")


@contextmanager
def small_pages(size=1024):
    """Pages that tests have tensors for; a link that ``auto`` finds room on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "_PAGE", size)
        patch.setattr(activation_offload, "_SMALLEST", size)
        patch.setattr(activation_offload, "_BYTES_PER_FLOP", 0.05)
        yield


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    with small_pages():
        yield
    torch.compiler.reset()


def offloading(arch, offload, policy="none"):
    """A model, and what offloads for it."""
    model = fresh_model(arch)
    model.set_recomputation(ActivationSection(policy=policy))
    if not offload:
        return model, None
    return model, ActivationOffload(model, offload, [range(arch.num_layers)], 24, CPU)


def step(model, number):
    hidden_BSD, routing = model.backbone(*batch(number))
    assert routing is not None
    loss = hidden_BSD.pow(3).mean() + routing.prob_sum_LE.square().sum() * 1e-3
    loss.backward()
    return loss.detach()


def answers(offload, policy, compiled, steps=4):
    torch.compiler.reset()
    model, done = offloading(MOE, offload, policy)
    counter = compile_counting(model) if compiled else None
    found = [step(model, number) for number in range(steps)]
    assert counter is None or counter.frame_count == 1
    assert not counters["graph_break"]
    return found + [p.grad for p in model.layers.parameters()], done


@pytest.mark.parametrize(
    ("policy", "compiled"), [("none", False), ("none", True), ("selective", True)]
)
def test_results_have_the_same_bits(policy, compiled):
    plain, _ = answers(0, policy, compiled)
    sent = []
    for offload in (1.0, 0.5, "auto"):
        found, done = answers(offload, policy, compiled)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), offload
        assert done.host.bytes_up == done.host.bytes_down
        sent.append(done.host.bytes_down)
    whole, half, auto = sent
    assert 0.25 * whole < half <= 0.5 * whole
    assert 0 < auto < whole


def alive(offload, compiled):
    """Bytes on the device between a forward and its backward, and those that travelled."""
    model, done = offloading(MOE.model_copy(update={"num_layers": 6}), offload)
    with Watch() as watch:
        answer = model.backbone(*batch(0))
    gc.collect()
    assert answer[0].requires_grad
    on_host = 0 if done is None else done.host.num_pages * activation_offload._PAGE
    return watch.alive() - on_host, 0 if done is None else done.host.bytes_down


def test_what_travels_is_gone_from_the_device():
    plain, _ = alive(0, compiled=False)
    left, sent = alive(1.0, compiled=False)
    assert plain - left >= 0.95 * sent > 0.4 * plain


def host_copies():
    """All that there are."""
    # A dead proxy of some other test has a type, but cannot be asked for its class.
    return [x for x in gc.get_objects() if type(x) is _HostCopy]


def test_pages_are_used_again_and_nothing_is_left():
    others = host_copies()  # autograd keeps what graphs saved whose backward failed in other tests
    model, done = offloading(MOE.model_copy(update={"num_layers": 6}), 1.0)
    pages = []
    for number in range(20):
        step(model, number)
        model.zero_grad()
        pages.append(done.host.num_pages)
        assert len(done.host.free) == pages[-1]
        assert len(host_copies()) == len(others)
    assert pages[0] > 0
    assert len(set(pages[2:])) == 1  # routing varies, and so do sizes
    assert max(pages) <= min(pages) + activation_offload._PAGES
    assert done.host.bytes_down > 5 * pages[-1] * activation_offload._PAGE


def test_a_graph_that_is_dropped_gives_its_pages_back():
    model, done = offloading(MOE, 1.0)
    hidden_BSD, _ = model.backbone(*batch(0))
    assert len(done.host.free) < done.host.num_pages
    del hidden_BSD, _
    gc.collect()
    assert len(done.host.free) == done.host.num_pages


def test_without_gradients_nothing_travels():
    model, done = offloading(MOE, 1.0)
    with torch.no_grad():
        model.backbone(*batch(0))
    assert done.host.num_pages == 0


def test_which_blocks_keep_what_they_have():
    assert _stays([range(6)]) == {4, 5}
    assert _stays([range(3), range(3, 7)]) == {2, 5, 6}


def same_on_ranks(runs):
    """By name, after two steps with and without: whether losses and weights are the same; what
    travelled; whether all pages are free."""
    found = {}
    with small_pages(256):
        for name, words in runs.items():
            results = []
            for offload in (0, 1):
                trainer = train([*words, f"activation.offload={offload}"], steps=0)
                losses = [trainer.train_step().loss for _ in range(2)]
                weights = [m.local.clone() for m in trainer.engine.fsdp.members.values()]
                results.append(torch.cat([x.flatten() for x in (*losses, *weights)]))
            host = trainer.model.call_block.host
            gc.collect()
            found[name] = (
                torch.equal(*results),
                host.bytes_down,
                len(host.free) == host.num_pages,
            )
    return found


def test_every_mesh_gives_the_same_bits(tiny_words):
    words = [*tiny_words, "model.num_layers=6", "train.micro_batch_size=1"]
    pp = [*words, "parallel.pp=2", "parallel.pp_split=3,3"]
    compiled = ["compile.enabled=yes"]
    runs = {
        "fsdp": [*words, "parallel.reshard_after_forward=yes", "parallel.dp_shard=2"],
        "ep": [*words, "parallel.ep=2", *compiled],
        "ep selective": [*words, "parallel.ep=2", *compiled, "activation.policy=selective"],
        "tp": [*words, "parallel.tp=2", "model.num_kv_heads=2"],
        "pp": pp,
        "pp gpipe": [*pp, "parallel.pp_schedule=gpipe"],
    }
    for found in spawn(2, same_on_ranks, runs, timeout=240):
        for name, (is_same, sent, is_free) in found.items():
            assert is_same, name
            assert sent > 0, name
            assert is_free, name


def test_packed_rows_and_adapters(tiny_words):
    words = [*tiny_words, "model.num_layers=4", "data.packing=whole", "compile.enabled=yes"]
    (found,) = same_on_ranks({"": words}).values()
    assert found[0]
    assert found[1] > 0
    (found,) = same_on_ranks({"": [*words, "lora.rank=8"]}).values()
    assert found[0]
    assert found[1] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("activation.offload=1.5", r"activation\.offload: '1\.5'"),
        ("activation.offload=some", r"activation\.offload: 'some'"),
        (
            "activation.offload=auto activation.policy=full",
            r"activation\.offload: 'auto' contradicts activation\.policy 'full'",
        ),
        (
            "activation.offload=0.5 activation.policy=selective compile.enabled=no",
            r"activation\.offload: 0\.5 contradicts .* set compile\.enabled yes",
        ),
    ],
)
def test_what_does_not_go_together(words, says):
    with pytest.raises(ConfigError, match=says):
        Config.load(None, words.split(), environ={})


def estimate(*words):
    sizes = ["model.num_layers=6", "train.micro_batch_size=16", "train.global_batch_size=16"]
    words = [*sizes, "compile.enabled=yes", *words]
    config = Config.load("qwen3-30b-a3b", words, environ={})
    arch = resolve_architecture(config.model)
    dims = ParallelDims.resolve(config.parallel, 1, arch)
    return estimate_memory(config, arch, dims, torch.bfloat16)


def test_the_estimate_knows(capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(activation_offload, "_BYTES_PER_FLOP", 50e9 / 450e12)
    plain, auto, half, whole = (
        estimate(f"activation.offload={offload}") for offload in (0, "auto", 0.5, 1)
    )
    for less in (auto, half, whole):
        assert plain.total - less.total == pytest.approx(less.host)
        assert plain.activations - less.activations == pytest.approx(less.host)
    assert plain.host == 0
    assert plain.total > auto.total > half.total > whole.total
    assert whole.host == pytest.approx(plain.activations * 4 / 6, rel=0.05)
    # A block of 65,536 tokens is 9.65 TFLOP: 19.9 M weights of attention, 37.7 M of eight experts,
    # and 16.8 M products of scores and values a token. In the time that takes the link has 1.07 GB.
    assert auto.host / 4 == pytest.approx(1.07e9, rel=0.05)
    words = "qwen3-30b-a3b --launch.gpus 4 --parallel.ep 4 --activation.offload auto --dry_run"
    assert main([*words.split(), "--train.global_batch_size", "8"]) == 0
    assert re.search(r"; activations on the host \d+\.\d", capsys.readouterr().err)


# ---- on a GPU -----------------------------------------------------------------------------------


def slow_links(monkeypatch):
    """Copies that begin late: whoever does not wait for them reads, or frees, too early."""
    copy = _HostPages._copy

    def late(self, stream, waits, pairs):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # 10 ms
        return copy(self, stream, waits, pairs)

    monkeypatch.setattr(_HostPages, "_copy", late)


def gpu_step(offload, policy, compiled):
    """Gradients, bytes that a forward left on the device, and bytes that travelled."""
    torch.compiler.reset()
    arch = GPU.model_copy(update={"num_layers": 6})
    model = Transformer(arch, kernels=KernelsSection(), moe=MoeSection())
    model.init_weights(std=0.02, seed=0)
    model.cuda().compute_dtype = torch.bfloat16
    model.set_recomputation(ActivationSection(policy=policy))
    done = None
    if offload:
        device = torch.device("cuda")
        done = ActivationOffload(model, offload, [range(6)], 512, device)
    if compiled:
        compile_blocks(model)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(0, arch.vocab_size, (8, 512), generator=generator).cuda()
    for _ in range(3):
        model.backbone(tokens_BS)[0].float().pow(3).mean().backward()
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    sent = done.host.bytes_down if done else 0
    hidden_BSD, _ = model.backbone(tokens_BS)
    kept = torch.cuda.memory_allocated() - before
    hidden_BSD.float().pow(3).mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.layers.parameters()])
    return gradients, kept, (done.host.bytes_down if done else 0) - sent


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "compiled"), [("none", False), ("none", True), ("selective", True)]
)
def test_offloading_on_a_gpu(policy, compiled, monkeypatch):
    monkeypatch.setattr(activation_offload, "_PAGE", 2**20)
    monkeypatch.setattr(activation_offload, "_SMALLEST", 2**20)
    plain, kept, _ = gpu_step(0, policy, compiled)
    found, left, sent = gpu_step(1.0, policy, compiled)
    error = (found - plain).norm() / plain.norm()
    assert error < 1e-3, error  # of sums whose order a GPU does not promise
    assert sent > 0.3 * kept
    assert kept - left >= 0.9 * sent
    slow_links(monkeypatch)
    found, _, _ = gpu_step(1.0, policy, compiled)
    assert (found - plain).norm() / plain.norm() < 1e-3
