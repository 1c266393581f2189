"""Fake of the package ``deep_ep`` on a CPU: its Buffer's contract within a machine, over gloo.

It keeps the promises about layouts, handles and order exactly, and behaves as badly as allowed
elsewhere: uninitialised memory is NaN, ``combine`` overwrites the ``send_head`` that it is given,
and the result of an asynchronous call is garbage until its event was waited for. Use it with
``sys.modules["deep_ep"] = fake_deep_ep``.

Legend: W ranks, E experts, T tokens here, K experts a token, S tokens received, C channels.
"""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from moetrain.parallel.mesh import all_gather_single

topk_idx_t = torch.int64

calls: Counter[str] = Counter()
"""Calls of this process by name; ``wait`` counts the dispatches that blocked the host."""


class Config(NamedTuple):
    num_sms: int
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * num_ranks * hidden_bytes


class Event:
    """Event of an asynchronous call whose results are pending."""

    def __init__(self, results=()) -> None:
        self.pairs = [(x, x.clone()) for x in results if x is not None]
        for late, _ in self.pairs:
            late.fill_(_garbage(late))

    def current_stream_wait(self) -> None:
        for late, value in self.pairs:
            late.copy_(value)
        self.pairs = []


def _garbage(x: torch.Tensor) -> float | int | bool:
    if x.dtype == torch.uint8:
        return 0x7F  # NaN in e4m3
    return float("nan") if x.is_floating_point() else x.dtype == torch.bool or 12345


class Buffer:
    num_sms = 20

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0, "a group within a machine needs no RDMA"
        assert explicitly_destroy
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_bytes = num_nvl_bytes
        dist.barrier(group)
        calls["buffer"] += 1

    def destroy(self) -> None:
        dist.barrier(self.group)
        self.group = None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> Event:
        return Event()

    def _layout(self, topk_idx, num_experts):
        local = num_experts // self.size
        is_token_in_rank = torch.stack(
            [(topk_idx // local == r).any(1) for r in range(self.size)], dim=1
        )
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)]).int()
        return is_token_in_rank.sum(0).int(), is_token_in_rank, per_expert

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert async_finish == allocate_on_comm_stream == (previous_event is not None)
        calls["dispatch" if handle is None else "cached dispatch"] += 1
        if isinstance(x, tuple):
            x, scales = x
            assert (x.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scales.shape in [(x.shape[0], n) for n in (1, -(-x.shape[1] // 128))]
            assert scales.is_contiguous()
            calls["in e4m3"] += 1
        else:
            scales = None
        assert x.is_contiguous()
        channels = config.num_sms // 2
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            rank_prefix, channel_prefix, _, source, is_token_in_rank, _ = handle
            assert channel_prefix.shape == (self.size, channels), "another number of SMs"
            x_S = self._send_scaled(x, scales, is_token_in_rank, rank_prefix, source.shape[0])
            return x_S, None, None, None, None, Event([x_S]) if async_finish else None
        for given in (topk_idx, topk_weights, is_token_in_rank):
            assert given.is_contiguous()
            assert given.shape[0] == x.shape[0]
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        counts_WW = torch.empty(self.size * self.size, dtype=torch.int32)
        all_gather_single(counts_WW, num_tokens_per_rank, group=self.group)
        # [i, j]: the rows that ranks 0 to i send to rank j.
        rank_prefix = counts_WW.view(self.size, self.size).cumsum(0).int()
        received = int(rank_prefix[-1, self.rank])
        rows = num_worst_tokens or received
        assert received <= rows, "written past the end of recv_x"

        in_channel_CTW = self._channels(channels, x.shape[0])[:, :, None] & is_token_in_rank
        channel_prefix = in_channel_CTW.sum(1).cumsum(0).T.int().contiguous()
        queue_TW = (in_channel_CTW.cumsum(1) - 1).where(in_channel_CTW, 0).sum(0)
        send_head = queue_TW.where(is_token_in_rank, -1).int()
        starts = channel_prefix - in_channel_CTW.sum(1).T.int()
        recv_channel_prefix = torch.empty_like(starts)
        dist.all_to_all_single(recv_channel_prefix, starts.contiguous(), group=self.group)

        num_experts = num_tokens_per_expert.shape[0]
        layout = self._layout(topk_idx, num_experts)
        for given, right in zip(
            (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert), layout, strict=True
        ):
            assert given.dtype == right.dtype
            assert torch.equal(given, right)
        local = num_experts // self.size
        tokens = torch.arange(x.shape[0], dtype=torch.int32)
        x_S = self._send_scaled(x, scales, is_token_in_rank, rank_prefix, rows)
        source = self._send(tokens, is_token_in_rank, rank_prefix, rows)
        ids_S = self._send(topk_idx, is_token_in_rank, rank_prefix, rows)
        weights_S = self._send(topk_weights, is_token_in_rank, rank_prefix, rows)
        mine = ids_S[:received] // local == self.rank
        ids_S[:received] = torch.where(mine, ids_S[:received] % local, -1)
        ids_S[received:] = -1
        weights_S[:received] *= mine
        per_expert = [int((ids_S == e).sum()) for e in range(local)]
        if num_worst_tokens:
            per_expert = []
        else:
            calls["wait"] += 1
        handle = (
            rank_prefix,
            channel_prefix,
            recv_channel_prefix,
            source,
            is_token_in_rank,
            send_head,
        )
        # The first dispatch has found the ranks that each token goes to.
        late = (x_S, ids_S, weights_S, *handle[:4], send_head)
        event = Event(late) if async_finish else None
        return x_S, ids_S, weights_S, per_expert, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert async_finish == allocate_on_comm_stream == (previous_event is not None)
        calls["combine"] += 1
        rank_prefix, _, recv_channel_prefix, source, _, send_head = handle
        channels, tokens = config.num_sms // 2, send_head.shape[0]
        assert recv_channel_prefix.shape == (self.size, channels), "another number of SMs"
        assert x.is_contiguous()
        assert x.shape[0] == source.shape[0]
        sent = [int(n) for n in rank_prefix.diff(dim=0, prepend=rank_prefix[:1] * 0)[:, self.rank]]
        is_in_rank = send_head >= 0
        back = is_in_rank.sum(0).tolist()
        # A token's position in its channel's queue, after those of earlier channels.
        in_channel_CTW = self._channels(channels, tokens)[:, :, None] & is_in_rank
        before_CW = in_channel_CTW.sum(1).cumsum(0) - in_channel_CTW.sum(1)
        row_TW = (in_channel_CTW * before_CW[:, None]).sum(0) + send_head
        results = []
        for given in (x, topk_weights):
            if given is None:
                results.append(None)
                continue
            assert given.is_contiguous()
            rows = given.new_empty(sum(back), *given.shape[1:])
            dist.all_to_all_single(rows, given[: sum(sent)], back, sent, group=self.group)
            wide = torch.promote_types(given.dtype, torch.float32)
            total = given.new_zeros(tokens, *given.shape[1:], dtype=wide)
            for part, row_T, here_T in zip(rows.split(back), row_TW.T, is_in_rank.T, strict=True):
                total[here_T] += part[row_T[here_T]]
            results.append(total.to(given.dtype))
        send_head.fill_(_garbage(send_head))
        return *results, Event(results) if async_finish else None

    def _channels(self, channels: int, tokens: int) -> torch.Tensor:
        """Return the consecutive tokens [T] of each channel; the last channel may have none."""
        size = max(1, -(-tokens // channels))
        return torch.arange(tokens) // size == torch.arange(channels)[:, None]

    def _send_scaled(self, x, scales, *where):
        if scales is None:
            return self._send(x, *where)
        return self._send(x.view(torch.uint8), *where).view(x.dtype), self._send(scales, *where)

    def _send(self, rows, is_token_in_rank, rank_prefix, num_received):
        """Send each rank its rows; the rows past the received ones are garbage."""
        sent = [int(n) for n in is_token_in_rank.sum(0)]
        received = rank_prefix[:, self.rank].diff(prepend=rank_prefix.new_zeros(1)).tolist()
        out = rows.new_full((num_received, *rows.shape[1:]), _garbage(rows))
        packed = torch.cat([rows[here_T] for here_T in is_token_in_rank.T])
        dist.all_to_all_single(out[: sum(received)], packed, received, sent, group=self.group)
        return out
