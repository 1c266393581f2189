"""``activation.offload`` storage by storage: what a block saves, whoever wrote the block."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_activation_offload import CPU, slow_links, small_pages
from torch import nn

from moetrain.parallel.offload import activations as activation_offload
from moetrain.parallel.offload.activations import ActivationOffload, _HostCopy, _HostPages


@pytest.fixture(autouse=True)
def small():
    with small_pages():
        yield


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

    def call(block, x_BSD, context):
        return block(x_BSD, context)

    arch = SimpleNamespace(layers=lambda: [()] * layers)
    model = SimpleNamespace(layers=blocks, arch=arch, call_block=call)
    done = ActivationOffload(model, share, [range(layers)], 1, device)

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
        empty, copy, leave, tensor = (
            torch.empty,
            _HostPages._copy,
            _HostCopy.offload,
            _HostCopy.tensor,
        )
        delete = _HostCopy.__del__
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", nullcontext)
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        patch.setattr(_HostPages, "_copy", lambda *args: self.copied(copy, *args))
        patch.setattr(_HostCopy, "offload", lambda one: self.used(leave, one, lambda: one.stream))
        patch.setattr(_HostCopy, "__del__", lambda one: self.used(delete, one, lambda: one.stream))
        patch.setattr(
            _HostCopy,
            "tensor",
            lambda one, *args: self.used(tensor, one, lambda: self.current, *args),
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

    def used(self, method, one, stream, *args):
        was_here, result = one.here, method(one, *args)
        if was_here is not None or one.here is not None:
            waited = one.last.known <= stream().known
            self.found |= set() if waited else {f"a copy is not waited for in {method.__name__}"}
        return result


def fail(*_):
    raise OverflowError


def host_of_streams():
    """A host memory that works as on a GPU, with streams as above."""
    host = _HostPages(CPU)
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
    left = []

    class Count(_HostCopy):
        def offload(self):
            left.append(done._blocks_begun)
            super().offload()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "_HostCopy", Count)
        patch.setattr(activation_offload, "link_bytes", lambda *_: each)
        run(x).sum().backward()
    assert done.host.bytes_down == (blocks - 2) * each
    # Not before the link has had the time, from the second block on; and soon after that.
    times = [2 + (n + 1) * X_BYTES / each for n in range(len(left))]
    assert all(time <= clock < time + 2 for time, clock in zip(times, left, strict=True))
    assert len(left) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("ends", ["backward", "drop"])
def test_nothing_is_read_or_freed_before_its_copy_is_done(monkeypatch, ends):
    monkeypatch.setattr(activation_offload, "_PAGE", 2**20)
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
