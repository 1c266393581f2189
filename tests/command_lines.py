"""Command lines of tests."""


def settled(words):
    """``words`` with each setting as it is given last, for a command line may give it only once."""
    last = {word.partition("=")[0]: i for i, word in enumerate(words)}
    return [word for i, word in enumerate(words) if last[word.partition("=")[0]] == i]
