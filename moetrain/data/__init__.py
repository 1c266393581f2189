"""Data: from files on disk to the batches of a step.

    containers (files) -> sources (records, texts) -> records (documents) -> cache (tokens)
    -> packing (rows) -> loader (batches)

A record's fields get their usual names in field_names and known_sets. Its dialogues are read in
messages and pairs, and rendered in chat. :func:`moetrain.data.loader.build_data` makes the rows.
The trainer makes the loader of batches, which needs to know the ranks.
"""
