"""Data: from files on disk to the batches of a step.

    sources -> documents -> tokenizer -> cache (memory-mapped) -> packing (rows) -> loader (batches)

:func:`build_data` follows the arrows as far as rows; the trainer makes the loader, which needs to
know the ranks.
"""
