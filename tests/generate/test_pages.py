"""Pages of the cache: prefix look-ups, and the cost of publishing."""

import random

import pytest

from moetrain.generate.pages import Pages
from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.scheduler import Running, Scheduler

SIZE = 2  # tokens of a page


def test_evicted_page_leaves_its_prefix_to_an_equal_page():
    pages = Pages(5, SIZE)
    (gone,), mine = pages.allocate(1), pages.allocate(1)
    pages.cache([gone], [1, 2])
    pages.cache(mine, [1, 2])
    mine += pages.allocate(1)
    pages.cache(mine, [1, 2, 3, 4])
    assert pages.match([1, 2, 3, 4]) == [gone, mine[1]]
    pages.release([gone, mine[1]])
    pages.release([gone])
    others = pages.allocate(3)  # all but mine
    assert pages.match([1, 2, 3, 4]) == mine
    for held in (mine, mine, others):
        pages.release(held)
    assert pages.num_available == 5
    assert pages.match([1, 2, 3, 4]) == mine


def test_duplicate_page_is_freed_when_its_sequence_ends():
    pages = Pages(3, SIZE)
    first, second = pages.allocate(1), pages.allocate(1)
    pages.cache(first, [1, 2])
    pages.cache(second, [1, 2])
    pages.release(second)
    pages.release(first)
    assert sorted(pages.allocate(2)) == [*second, 2]  # not a page with published content
    assert pages.match([1, 2]) == first


def test_running_sequences_publish_again_after_clear_cache():
    pages = Pages(3, SIZE)
    own = pages.allocate(2)
    pages.cache(own, [1, 2, 3, 4])
    pages.clear_cache()
    assert pages.match([1, 2, 3, 4]) == []
    own += pages.allocate(1)
    pages.cache(own, [1, 2, 3, 4, 5, 6])
    assert pages.match([1, 2, 3, 4, 5, 6]) == own


@pytest.mark.parametrize("seed", range(20))
def test_published_prefixes_match_while_their_sequences_run(seed):
    """Texts have two kinds of tokens, so many prefixes match; pages are scarce."""
    rng = random.Random(seed)
    pages = Pages(13, SIZE)
    holds: dict[int, tuple[int, ...]] = {}  # page: its sequence's tokens up to the page's end
    running: list[tuple[list[int], list[int]]] = []  # tokens, and the pages that hold them
    in_others = 0

    def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    for _ in range(400):
        waits = len(running) < 6 and rng.random() < 0.4
        if not running or waits:
            tokens = rng.choices((0, 1), k=SIZE * rng.randrange(1, 4))
            sequence = (tokens, pages.match(tokens) if rng.random() < 0.5 else [])
            running.append(sequence)
        else:
            sequence = rng.choice(running)
            sequence[0].extend(rng.choices((0, 1), k=SIZE))
        tokens, own = sequence
        new = pages.allocate(len(tokens) // SIZE - len(own))
        if new is None or rng.random() < 0.2:
            pages.release([*own, *(new or [])])
            running.remove(sequence)
        else:
            own += new
            holds |= zip(own, prefixes(tokens), strict=True)
            pages.cache(own, tokens)
        assert pages.num_available == 13 - len({page for _, own in running for page in own})
        for tokens, own in running:
            found = pages.match(tokens)
            assert [holds[page] for page in found] == prefixes(tokens)
            in_others += found != own
            pages.release(found)
    assert in_others  # some hits are in other sequences' pages


class CountedTokens(list):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, at):
        part = super().__getitem__(at)
        self.num_read += len(part) if isinstance(at, slice) else 1
        return part


def test_publishing_reads_every_token_once():
    scheduler = Scheduler(Pages(600, SIZE), max_sequences=4, max_tokens=7)
    request = Request("a", tuple(range(100)), SamplingParams(max_tokens=1000))
    sequence = Running(request, 0, 600, stream=0)
    sequence.tokens = CountedTokens(sequence.tokens)
    scheduler.waiting.append(sequence)
    while len(sequence.tokens) < 1100:
        ((_, number),) = scheduler.plan()
        scheduler.mark_read(sequence, number)
        if sequence.num_unread == 0:
            sequence.tokens.append(7)
    read_at_all = 1098  # the last full page ends there
    assert sequence.tokens.num_read == 99 + read_at_all  # to look for others' pages, and to publish
    scheduler.remove(sequence)
    assert len(scheduler.pages.match(sequence.tokens)) == read_at_all // SIZE


def test_pages_are_evicted_least_recently_used_first():
    pages = Pages(2, page_size=1)
    for token in (5, 6):
        mine = pages.allocate(1)
        pages.cache(mine, [token])
        pages.release(mine)
    assert pages.allocate(1)
    assert not pages.match([5])
    assert pages.match([6])
