"""Data: from files on disk to the batches of a step.

    sources -> documents -> tokenizer -> cache (memory-mapped) -> packing (rows) -> loader (batches)

:func:`moetrain.data.loader.build_data` goes as far as rows. The trainer makes the loader of
batches, which needs to know the ranks.
"""
