"""The estimate of memory of the pipeline rank that takes most."""

from moetrain.train.estimates.memory import RankSizes


def estimate_memory(config, arch, dims, dtype, sleep=None):
    """``sleep``: as :meth:`RankSizes.peak` takes it."""
    ranks = RankSizes.of_ranks(config, arch, dims, dtype)
    return max((rank.peak(sleep) for rank in ranks), key=lambda estimate: estimate.total)
