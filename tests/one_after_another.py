"""Train runs one after another in one process group: ``torchrun one_after_another.py FILE``.

FILE is a JSON list of runs, each a list of words on top of the recipe ``debug``.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from moetrain.config import Config
from moetrain.train.trainer import Trainer

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for words in json.loads(Path(sys.argv[1]).read_text()):
        Trainer(Config.load("debug", words, environ={})).fit()
    dist.destroy_process_group()
