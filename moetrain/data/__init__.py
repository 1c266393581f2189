"""Data: from files on disk to the batches of a step.

    sources -> documents -> tokenizer -> cache (memory-mapped) -> packing (rows) -> loader (batches)

:func:`build_data` follows the arrows as far as rows; the trainer makes the loader, which needs to
know the ranks.
"""

from moetrain.data.build import Data, build_data
from moetrain.data.loader import Batch, Loader, eval_batches
from moetrain.data.packing import IGNORE_INDEX, Dataset

__all__ = ["IGNORE_INDEX", "Batch", "Data", "Dataset", "Loader", "build_data", "eval_batches"]
