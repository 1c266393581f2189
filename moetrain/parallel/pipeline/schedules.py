"""Pipeline schedules as data: for every rank what it runs, on which micro-batch, in which order.

A stage is a range of a model's blocks; each rank has as many of them (``virtual``). What a stage
does to a micro-batch is an :class:`Action`:

    F  forward           needs the activations of the stage before
    B  backward          needs the gradient of what the stage gave; makes the one of what it got
    I  backward-input    the half of B that the stage before waits for
    W  backward-weight   the other half, of which nobody waits

A :class:`Pair` is a forward and a backward of other micro-batches that a rank runs side by side, a
block of the one and a block of the other by turns: what one waits for passes while the other works.

A schedule is made by a pure function of three numbers, and holds nothing else: what is sent and
received follows from it (:mod:`moetrain.parallel.pipeline.transfers`), and so do time and memory
(:mod:`moetrain.parallel.pipeline.simulator`). Worked example, 1f1b of 2 ranks, 3 micro-batches::

    rank 0   F0 F1    B0 F2    B1    B2
    rank 1      F0 B0 F1    B1 F2 B2

Bubble (the time that a rank idles) and peak (micro-batches of a stage whose activations rank r has
at once), of p ranks with v stages each and m micro-batches, where a stage takes f, i and w for F, I
and W:

    gpipe             arXiv 1811.06965   (p-1)(f+i+w)    m
    1f1b              arXiv 2104.04473   (p-1)(f+i+w)    p-r
    interleaved_1f1b  arXiv 2104.04473   (p-1)(f+i+w)    (v-1)p + 2(p-r) - 1    f, i, w / v each
    zero_bubble       arXiv 2401.10241   (p-1)(f+i-w)    p                      ZB-H1
    zbv               arXiv 2405.15362   (p-1) f         2p                     v=2, in a V
    merged_1f1b       arXiv 2412.19437   (p-1)(f+i+w)    2(p-r)

The last one is 1f1b with DualPipe's idea: every backward has a forward beside it, for which it
needs micro-batches to choose from, twice as many as 1f1b. The bubble is that of pairs which save
nothing; it shrinks with the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a rank does at once."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """``F3.1``: the forward of micro-batch 3 in stage 1."""
        return f"{self.kind}{self.micro_batch}.{self.stage}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Itself alone."""
        return (self,)


class Pair(NamedTuple):
    """A forward and a backward at once: each needs what it needs by itself."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Both."""
        return (self.forward, self.backward)


Work = Action | Pair
"""What a rank does between two looks at what has arrived."""


@dataclass(frozen=True)
class Schedule:
    """Who does what when."""

    name: str
    rank_of_stage: tuple[int, ...]
    num_micro_batches: int
    actions: tuple[tuple[Work, ...], ...]
    """Of every rank, in order."""

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that ``rank`` has, in the order of the model."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def needs(self, action: Action) -> list[Action]:
        """What must be done before, one of each list's kinds: see the head of this file."""
        kind, stage, micro_batch = action
        if kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage else []
        if kind == "W":
            return [Action("I", stage, micro_batch)]
        own = Action("F", stage, micro_batch)
        if stage == self.num_stages - 1:
            return [own]
        return [own, Action(self.gradient_kind, stage + 1, micro_batch)]

    @cached_property
    def gradient_kind(self) -> Kind:
        """Of the actions that make the gradient which the stage before needs."""
        kinds = {part.kind for rank in self.actions for work in rank for part in work.parts}
        return "I" if "I" in kinds else "B"

    def receiver(self, action: Action) -> int | None:
        """The stage that needs what ``action`` makes; None: no stage does."""
        after = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
        return after if 0 <= after < self.num_stages else None


# ---- what every rank does -----------------------------------------------------------------------


def _weave(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], warmup: int
) -> Iterator[Action]:
    """``warmup`` forwards, then a forward and a backward by turns, then what backwards are left."""
    yield from forwards[:warmup]
    rest = forwards[warmup:]
    for i, backward in enumerate(backwards):
        yield from rest[i : i + 1]
        yield from backward


def _gpipe(r: int, p: int, v: int, m: int) -> Iterator[Action]:
    forwards = [Action("F", r, k) for k in range(m)]
    return _weave(forwards, [[Action("B", r, k)] for k in range(m)], m)


def _one_by_one(r: int, p: int, v: int, m: int) -> Iterator[Action]:
    """Micro-batches go in groups of p through one stage of this rank after the other."""
    rounds = [(k // (v * p) * p + k % p, k // p % v) for k in range(v * m)]
    forwards = [Action("F", r + chunk * p, k) for k, chunk in rounds]
    backwards = [[Action("B", r + (v - 1 - chunk) * p, k)] for k, chunk in rounds]
    warmup = p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * p
    return _weave(forwards, backwards, warmup)


def _merged(r: int, p: int, v: int, m: int) -> Iterator[Work]:
    """A rank's next forward is there once the rank before had a pair's time more than it needs for
    1f1b; and so is its next backward: on every rank they are an odd number of micro-batches apart.
    """
    warmup = min(m, 2 * (p - r) - 1)
    yield from (Action("F", r, k) for k in range(warmup))
    for k in range(m):
        backward, next_one = Action("B", r, k), k + warmup
        yield Pair(Action("F", r, next_one), backward) if next_one < m else backward


def _zero_bubble(r: int, p: int, v: int, m: int) -> Iterator[Action]:
    """1f1b whose weight gradients come r backwards late: then as much is kept on every rank."""
    forwards = [Action("F", r, k) for k in range(m)]
    halves = [[Action("I", r, k), *_late(r, k - r)] for k in range(m)]
    yield from _weave(forwards, halves, p - r - 1)
    for k in range(max(0, m - r), m):
        yield Action("W", r, k)


def _late(stage: int, micro_batch: int) -> list[Action]:
    return [Action("W", stage, micro_batch)] if micro_batch >= 0 else []


def _zbv(r: int, p: int, v: int, m: int) -> Iterator[Action]:
    """Rank r has the stages r (words with a 0) and 2p-1-r (a 1), so that the last stage's backward
    follows its forward on the rank where the first stage is. Each word takes its next micro-batch;
    the pattern is of 2p-1 micro-batches at least, and those too many are left out."""
    n = max(m, 2 * p - 1)
    words = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (p - r)
    for k in range(n - p):
        words += ["F0"] * (k < n - (2 * p - r - 1)) + ["I0", "W0", "F1", "I1", "W1"]
    words += ["I0", "I1"] * r + ["I0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
    done: Counter[str] = Counter()
    kinds: dict[str, Kind] = {"F": "F", "I": "I", "W": "W"}
    for word in words:
        if done[word] < m:
            yield Action(kinds[word[0]], r if word[1] == "0" else 2 * p - 1 - r, done[word])
        done[word] += 1


# ---- the table ----------------------------------------------------------------------------------


class Costs(NamedTuple):
    """How long a stage takes, in any unit."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    communication: float = 0.0
    """From the end of an action until another rank has what it made."""
    saving: float = 0.0
    """The time by which a pair is shorter than its two halves."""
    scale: Sequence[float] | None = None
    """By what each stage's times are to be multiplied; None: stages are alike."""

    def of(self, work: Work) -> float:
        """The time of an action or a pair."""
        times = {"F": self[0], "B": self[1] + self[2], "I": self[1], "W": self[2]}
        time = sum(times[part.kind] for part in work.parts)
        time -= self.saving * (len(work.parts) - 1)
        return time * (1 if self.scale is None else self.scale[work.parts[0].stage])


@dataclass(frozen=True)
class Recipe:
    """A kind of schedule."""

    actions: Callable[[int, int, int, int], Iterator[Work]]
    """Of rank r of p, with v stages, for m micro-batches."""
    virtual: Sequence[int]
    """How many stages a rank can have."""
    peak: Callable[[int, int, int, int], int]
    """The most (stage, micro-batch) pairs whose activations rank r of p has at once."""
    bubble: Callable[[Costs], float]
    """The idle time of a rank over p - 1, if communication takes none and p micro-batches or more
    (zbv: 2p-1) keep it busy; ``zero_bubble`` and ``zbv`` with f, i and w alike."""
    is_v: bool = False
    """Whether stages go back from the last rank to the first."""
    by_rounds: bool = False
    """Whether micro-batches must be a multiple of the ranks."""


def _whole(costs: Costs) -> float:
    return costs.forward + costs.backward_input + costs.backward_weight


RECIPES: Mapping[str, Recipe] = {
    "gpipe": Recipe(_gpipe, (1,), lambda r, p, v, m: m, _whole),
    "1f1b": Recipe(_one_by_one, (1,), lambda r, p, v, m: min(m, p - r), _whole),
    "interleaved_1f1b": Recipe(
        _one_by_one,
        range(2, 65),
        lambda r, p, v, m: min(v * m, (v - 1) * p + 2 * (p - r) - 1),
        _whole,
        by_rounds=True,
    ),
    "zero_bubble": Recipe(
        _zero_bubble,
        (1,),
        lambda r, p, v, m: min(m, p),
        lambda c: c.forward + c.backward_input - c.backward_weight,
    ),
    "zbv": Recipe(_zbv, (2,), lambda r, p, v, m: min(2 * m, 2 * p), lambda c: c.forward, is_v=True),
    "merged_1f1b": Recipe(_merged, (1,), lambda r, p, v, m: min(m, 2 * (p - r)), _whole),
}


def make_schedule(name: str, ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """The schedule ``name`` of ``ranks`` with ``virtual`` stages each.

    Raises:
        ValueError: there is none; it lists what is possible.
    """
    if name not in RECIPES:
        raise ValueError(f"{name!r} is no schedule; use one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if virtual not in recipe.virtual:
        low, high = recipe.virtual[0], recipe.virtual[-1]
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ValueError(f"{virtual} stages a rank, where {name} takes {wanted}")
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"{ranks} ranks and {micro_batches} micro-batches; use 1 or more of each")
    if recipe.by_rounds and micro_batches % ranks:
        raise ValueError(
            f"{micro_batches} micro-batches, where {name} takes a multiple of its {ranks} ranks; "
            f"{', '.join(other for other, r in RECIPES.items() if not r.by_rounds)} take any number"
        )
    return Schedule(
        name,
        place_stages(ranks, virtual, is_v=recipe.is_v),
        micro_batches,
        tuple(tuple(recipe.actions(r, ranks, virtual, micro_batches)) for r in range(ranks)),
    )


def forward_only(rank_of_stage: tuple[int, ...], micro_batches: int) -> Schedule:
    """Every stage's forward of each micro-batch, in turn."""
    stages = list(enumerate(rank_of_stage))
    actions = tuple(
        tuple(Action("F", s, k) for k in range(micro_batches) for s, owner in stages if owner == r)
        for r in range(max(rank_of_stage) + 1)
    )
    return Schedule("forward", rank_of_stage, micro_batches, actions)


def place_stages(ranks: int, virtual: int, *, is_v: bool) -> tuple[int, ...]:
    """The rank of every stage: round after round, or back and forth."""
    return tuple(
        ranks - 1 - stage % ranks if is_v and stage // ranks % 2 else stage % ranks
        for stage in range(ranks * virtual)
    )
