"""``python -m moetrain.score``, which is :mod:`moetrain.cli.score`."""

from moetrain.cli.main import leave
from moetrain.cli.score import main

if __name__ == "__main__":
    leave(main())
