"""``moetrain train``, which waits seconds where a run waits minutes: for tests of what never comes.

``python impatient_train.py SECONDS SECONDS [WORD ...]``: the first limit the wait for another
machine to show that it has the folder, the others every collective.
"""

import sys
from datetime import timedelta

from moetrain.cli.train import main
from moetrain.parallel import processes, world
from moetrain.train import run_folder

if __name__ == "__main__":
    run_folder._VISIBLE_SECONDS = float(sys.argv.pop(1))
    processes.TIMEOUT = world.TIMEOUT = timedelta(seconds=float(sys.argv.pop(1)))
    sys.exit(main())
