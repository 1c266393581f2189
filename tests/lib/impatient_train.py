"""``moetrain train`` that waits seconds, not a minute, for another machine's files.

``python impatient_train.py SECONDS [WORD ...]``
"""

import sys

from moetrain.cli.train import main
from moetrain.train import run_folder

if __name__ == "__main__":
    run_folder._VISIBLE_SECONDS = float(sys.argv.pop(1))
    sys.exit(main())
