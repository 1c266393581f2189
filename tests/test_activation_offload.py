"""``activation.offload``: same bits, less memory, pages used again, nothing left behind."""

import gc
import re
from contextlib import contextmanager, nullcontext

import pytest
import torch
from distributed import spawn
from test_activation import GPU, Watch, train
from test_compile import MOE, batch, compile_counting, fresh_model
from torch import nn
from torch._dynamo.utils import counters

from moetrain.config import ActivationSection, Config, ConfigError, KernelsSection, MoeSection
from moetrain.memory import estimate_memory
from moetrain.models import (
    build_model,
    compile_blocks,
    init_weights,
    resolve_architecture,
    set_recomputation,
)
from moetrain.parallel import activation_offload
from moetrain.parallel.activation_offload import (
    ActivationOffload,
    HostCopy,
    HostPages,
    offload_activations,
    stays,
)
from moetrain.parallel.mesh import ParallelDims
from moetrain.train import main

CPU = torch.device("cpu")


@contextmanager
def small_pages(size=1024):
    """Pages that tests have tensors for; a link that ``auto`` finds room on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "PAGE", size)
        patch.setattr(activation_offload, "SMALLEST", size)
        patch.setattr(activation_offload, "BYTES_PER_FLOP", 0.05)
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
    set_recomputation(model, ActivationSection(policy=policy))
    if not offload:
        return model, None
    return model, offload_activations(model, offload, [range(arch.num_layers)], 24, CPU)


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
    on_host = 0 if done is None else done.host.num_pages * activation_offload.PAGE
    return watch.alive() - on_host, 0 if done is None else done.host.bytes_down


def test_what_travels_is_gone_from_the_device():
    plain, _ = alive(0, compiled=False)
    left, sent = alive(1.0, compiled=False)
    assert plain - left >= 0.95 * sent > 0.4 * plain


def test_pages_are_used_again_and_nothing_is_left():
    model, done = offloading(MOE.model_copy(update={"num_layers": 6}), 1.0)
    pages = []
    for number in range(20):
        step(model, number)
        model.zero_grad()
        pages.append(done.host.num_pages)
        assert len(done.host.free) == pages[-1]
        assert not [x for x in gc.get_objects() if isinstance(x, HostCopy)]
    assert pages[0] > 0
    assert len(set(pages[2:])) == 1  # routing varies, and so do sizes
    assert max(pages) <= min(pages) + activation_offload.PAGES
    assert done.host.bytes_down > 5 * pages[-1] * activation_offload.PAGE


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


class Toy(nn.Module):
    """A block of which tests know what it saves; ``function`` makes what it gives."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 40))
        self.function = function

    def forward(self, x_BSD, context):
        return self.function(self, x_BSD, context), None


def toys(function, layers=4, share=1.0, device=CPU):
    """Toy blocks in a row as one function of what the first one gets; and what offloads."""
    blocks = [Toy(function).to(device) for _ in range(layers)]
    numbers = {block: number for number, block in enumerate(blocks)}

    def call(block, x_BSD, context):
        return block(x_BSD, context)

    stay = stays([range(layers)])
    done = ActivationOffload(call, numbers, stay, share, lambda *_: 0.0, device)

    def run(x_BSD, context=()):
        for block in blocks:
            x_BSD, _ = done(block, x_BSD, context)
        return x_BSD

    return run, done, blocks


X_BYTES = 30 * 40 * 4


@pytest.fixture
def x():
    return torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_views_of_one_storage_travel_once(x):
    run, done, _ = toys(lambda block, x, _: (x[:, :20] * x[:, 20:]).repeat(1, 2) + x.t().t().sin())
    run(x).sum().backward()
    assert done.host.bytes_down == done.host.bytes_up == 2 * X_BYTES  # what two blocks get
    found = x.grad.clone()
    x.grad = None
    toys(lambda block, x, _: (x[:, :20] * x[:, 20:]).repeat(1, 2) + x.t().t().sin(), share=0.0)[0](
        x
    ).sum().backward()
    assert torch.equal(x.grad, found)


def test_neither_parameters_nor_what_blocks_share_travel(x):
    shared = torch.randn(30, 40)
    run, done, _ = toys(lambda block, x, shared: (x @ block.weight) * shared)
    run(x, shared).sum().backward()
    assert done.host.bytes_down == 2 * X_BYTES  # x alone, for the weight's gradient


def test_strides_and_offsets_come_back(x):
    def function(block, x, _):
        wide = (x.t() @ x[:, :32])[:, 5:25]  # of [40, 32]: its rows are further apart
        return (wide.sin() * 2).exp().t().repeat(2, 1)[:30]

    gradients = []
    for share in (0.0, 1.0):
        run, done, _ = toys(function, share=share)
        run(x).sum().backward()
        gradients.append(x.grad.clone())
        x.grad = None
        assert (done.host.bytes_down > 0) == bool(share)
    assert torch.equal(*gradients)


def test_a_graph_can_be_run_twice(x):
    run, done, blocks = toys(lambda block, x, _: (x @ block.weight).sin())
    y = run(x).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for b in blocks for p in b.parameters()]
    up = done.host.bytes_up
    y.backward()
    again = [p.grad for b in blocks for p in b.parameters()]
    assert all(torch.equal(2 * a, b) for a, b in zip(once, again, strict=True))
    assert done.host.bytes_up == up  # it had stayed


def test_two_graphs_at_once(x):
    """As pipelines have them: forwards first, then backwards, in the order of the forwards."""
    gradients = []
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        run, _, blocks = toys(lambda block, x, _: (x @ block.weight).sin(), share=share)
        outputs = [run(x * scale).sum() for scale in (1, 2, 3)]
        for y in outputs:
            y.backward()
        gradients.append([p.grad for b in blocks for p in b.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Event:
    """What had happened when it was recorded."""

    def __init__(self, known):
        self.known = known


class Stream:
    """A stream of no device: what it runs is done at once, and what it would have to wait for to
    be sure of that is known by ``known``, numbers of copies."""

    def __init__(self, device=None):
        self.known = frozenset()

    def wait_stream(self, other):
        self.known |= other.known

    def wait_event(self, event):
        self.known |= event.known

    def record_event(self):
        return Event(self.known)


class Races:
    """Notices who reads, writes or frees memory that a copy may still be at."""

    def __init__(self, patch):
        self.current = Stream()
        self.accesses, self.num_copies, self.found = {}, 0, set()
        empty, copy, leave, storage = torch.empty, HostPages._copy, HostCopy.leave, HostCopy.storage
        delete = HostCopy.__del__
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", nullcontext)
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        patch.setattr(HostPages, "_copy", lambda *args: self.copied(copy, *args))
        patch.setattr(HostCopy, "leave", lambda one: self.used(leave, one, lambda: one.stream))
        patch.setattr(HostCopy, "__del__", lambda one: self.used(delete, one, lambda: one.stream))
        patch.setattr(
            HostCopy, "storage", lambda one: self.used(storage, one, lambda: self.current)
        )

    def copied(self, copy, host, stream, waits, pairs):
        event = copy(host, stream, waits, pairs)
        for target, source in pairs:
            page = (target if stream is host._down else source).data_ptr()
            before = self.accesses.setdefault(page, set())
            self.found |= {"a page is still in use"} if before - event.known else set()
            self.num_copies += 1
            before.add(self.num_copies)
            stream.known |= {self.num_copies}
        return stream.record_event()

    def used(self, method, one, stream):
        was_here, result = one.here, method(one)
        if was_here is not None or one.here is not None:
            waited = one.last.known <= stream().known
            self.found |= set() if waited else {f"a copy is not waited for in {method.__name__}"}
        return result


def fail(*_):
    raise OverflowError


def host_of_streams():
    """A host memory that works as on a GPU, with streams as above."""
    host = HostPages(CPU)
    host.on_cuda = True
    host._down, host._up = Stream(), Stream()
    return host


@pytest.mark.parametrize("orders", ["1 2 3", "3 2 1", "2 1 3"])
def test_nobody_uses_memory_that_a_copy_is_at(monkeypatch, x, orders):
    """Micro-batches on streams of their own, which nothing brings together, as within a pair."""
    gradients = []
    for share in (0.0, 1.0, 0.6):
        torch.manual_seed(0)
        run, done, blocks = toys(lambda b, x, _: (x @ b.weight).sin(), layers=6, share=share)
        with pytest.MonkeyPatch.context() as patch:
            races = Races(patch)
            done.host = host_of_streams()
            streams = {name: Stream() for name in "123"}
            for _ in range(3):
                outputs = {}
                for name, stream in streams.items():
                    races.current = stream
                    outputs[name] = run(x * int(name)).sum()
                for name in orders.split():
                    races.current = streams[name]
                    outputs.pop(name).backward()
            blocks[3].function = fail
            with pytest.raises(OverflowError):
                run(x)  # what is on its way goes with its graph
            assert not races.found
            assert len(done.host.free) == done.host.num_pages
            assert (races.num_copies > 100) == bool(share)
        gradients.append([p.grad for b in blocks for p in b.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


@pytest.mark.parametrize(("share", "which"), [(0.0, 0), (0.0, 3), (1.0, 0), (1.0, 3)])
def test_a_tensor_that_is_changed_afterwards(x, share, which):
    made = []

    def function(block, x, _):
        y = x + 1
        made.append(y)
        return y * y

    run, _, _ = toys(function, share=share)
    run(x).sum().backward()
    gradient, x.grad = x.grad, None
    made.clear()
    y = run(x).sum()
    made[which].add_(1)
    if share and which == 0:  # what the gradient needs is on the host
        y.backward()
        assert torch.equal(x.grad, gradient)
    else:
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            y.backward()


def test_a_tensor_that_is_changed_on_its_way_is_an_error(x):
    made = []

    def function(block, x, _):
        if len(made) == 1:
            made[0].add_(1)  # while it is copied
        y = x + 1
        made.append(y)
        return y * y

    run, _, _ = toys(function)
    with pytest.raises(RuntimeError, match=r"shape \(30, 40\) .* changed in place"):
        run(x)


def test_the_share_is_of_the_bytes(x):
    run, done, _ = toys(lambda block, x, _: (x @ block.weight).sin(), layers=22, share=0.3)
    run(x).sum().backward()
    # 20 blocks, two tensors each: what it gets, and the product.
    assert done.host.bytes_down == int(0.3 * 40) * X_BYTES


def test_auto_fills_the_link_and_no_more(x):
    blocks, each = 42, 1.5 * X_BYTES
    run, done, _ = toys(lambda block, x, _: (x @ block.weight).sin(), layers=blocks, share="auto")
    done.allowance = lambda number, x: each
    left = []

    class Count(HostCopy):
        def leave(self):
            left.append(done._clock)
            super().leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "HostCopy", Count)
        run(x).sum().backward()
    assert done.host.bytes_down == (blocks - 2) * each
    # Not before the link has had the time, from the second block on; and soon after that.
    times = [2 + (n + 1) * X_BYTES / each for n in range(len(left))]
    assert all(time <= clock < time + 2 for time, clock in zip(times, left, strict=True))
    assert len(left) > 50


def test_which_blocks_keep_what_they_have():
    assert stays([range(6)]) == {4, 5}
    assert stays([range(3), range(3, 7)]) == {2, 5, 6}


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
        "pp pairs": [*pp, "parallel.pp_schedule=merged_1f1b"],
        "pp split": [*pp, "parallel.pp_schedule=zero_bubble"],
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
            "activation.offload=0.5 activation.policy=selective",
            r"activation\.offload: 0\.5, .* set compile\.enabled yes",
        ),
    ],
)
def test_what_does_not_go_together(words, says):
    with pytest.raises(ConfigError, match=says):
        Config.load(None, words.split(), environ={})


def estimate(*words):
    sizes = ["model.num_layers=6", "train.micro_batch_size=16", "train.global_batch_size=16"]
    config = Config.load("qwen3-30b-a3b", [*sizes, *words], environ={})
    arch = resolve_architecture(config.model)
    dims = ParallelDims.resolve(config.parallel, 1, arch)
    return estimate_memory(config, arch, dims, torch.bfloat16)


def test_the_estimate_knows(capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(activation_offload, "BYTES_PER_FLOP", 50e9 / 450e12)
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
    words = "qwen3-30b-a3b --parallel.ep 4 --activation.offload auto --dry_run"
    assert main([*words.split(), "--train.global_batch_size", "8"]) == 0
    assert re.search(r"; activations on the host \d+\.\d", capsys.readouterr().err)


# ---- on a GPU -----------------------------------------------------------------------------------


def slow_links(monkeypatch):
    """Copies that begin late: whoever does not wait for them reads, or frees, too early."""
    copy = HostPages._copy

    def late(self, stream, waits, pairs):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # 10 ms
        return copy(self, stream, waits, pairs)

    monkeypatch.setattr(HostPages, "_copy", late)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", ["backward", "drop"])
def test_nothing_is_read_or_freed_before_its_copy_is_done(monkeypatch, ends):
    monkeypatch.setattr(activation_offload, "PAGE", 2**20)
    slow_links(monkeypatch)
    device = torch.device("cuda")
    x = torch.randn(1000, 40, device=device, requires_grad=True)
    gradients = []
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        run, done, blocks = toys(lambda b, x, _: (x @ b.weight).sin(), 6, share, device)
        for _ in range(3):
            y = run(x)
            if ends == "drop":
                del y
                torch.full((6, 1000, 40), float("nan"), device=device)  # where it lay
                y = run(x)
            y.sum().backward()
        gradients.append([x.grad.clone(), *(p.grad for b in blocks for p in b.parameters())])
        x.grad = None
        assert (done.host.bytes_down > 0) == bool(share)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def gpu_step(offload, policy, compiled):
    """Gradients, bytes that a forward left on the device, and bytes that travelled."""
    torch.compiler.reset()
    arch = GPU.model_copy(update={"num_layers": 6})
    model = build_model(arch, kernels=KernelsSection(), moe=MoeSection())
    init_weights(model, std=0.02, seed=0)
    model.cuda().compute_dtype = torch.bfloat16
    set_recomputation(model, ActivationSection(policy=policy))
    done = None
    if offload:
        device = torch.device("cuda")
        done = offload_activations(model, offload, [range(6)], 512, device)
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
    monkeypatch.setattr(activation_offload, "PAGE", 2**20)
    monkeypatch.setattr(activation_offload, "SMALLEST", 2**20)
    plain, kept, _ = gpu_step(0, policy, compiled)
    found, left, sent = gpu_step(1.0, policy, compiled)
    error = (found - plain).norm() / plain.norm()
    assert error < 1e-3, error  # of sums whose order a GPU does not promise
    assert sent > 0.3 * kept
    assert kept - left >= 0.9 * sent
    slow_links(monkeypatch)
    found, _, _ = gpu_step(1.0, policy, compiled)
    assert (found - plain).norm() / plain.norm() < 1e-3
