"""Memory estimate of the pipeline rank with the highest peak."""

from moetrain.train.estimates.memory import RankSizes


def estimate_memory(config, arch, dims, dtype, sleep=None):
    """Return the largest estimated peak over pipeline ranks; ``sleep`` as in
    :meth:`RankSizes.peak`."""
    ranks = RankSizes.of_ranks(config, arch, dims, dtype)
    return max((rank.peak(sleep) for rank in ranks), key=lambda estimate: estimate.total)
