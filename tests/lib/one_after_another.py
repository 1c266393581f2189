"""Train runs one after another in one process group: ``torchrun one_after_another.py FILE``.

FILE is a JSON list of runs, each a list of words on top of the recipe ``debug``. An entry
``{"until": STEP, "words": [...]}`` is a run that is cut off after that step as if it were killed.
An entry ``{"lose": FOLDER, "of": HOST}`` empties a folder on that machine's own disk.
"""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from moetrain.config import Config
from tests.lib.recoveries import train


def lose(folder: Path, host: str) -> None:
    if socket.gethostname() == host and os.environ["LOCAL_RANK"] == "0":
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for run in json.loads(Path(sys.argv[1]).read_text()):
        if "lose" in run:
            lose(Path(run["lose"]), run["of"])
            continue
        words, until = (run["words"], run["until"]) if isinstance(run, dict) else (run, None)
        train(Config.load("debug", words, environ={}), until)
    dist.destroy_process_group()
