"""``moetrain bench``: time training steps of any recipe or settings, on any number of processes.

Real steps, the optimizer included, of the run that ``moetrain train`` would begin with the same
settings; nothing is saved or resumed. Four steps warm up, then ``train.steps`` are timed, which are
ten unless the command line, a file or the environment says otherwise.
``scripts/bench_train.py`` says besides where the time of a step goes.
"""

import json
from functools import partial

import torch

from moetrain.cli.main import leave
from moetrain.cli.train import main as _main
from moetrain.config import Config
from moetrain.train.run import garbage_collector_off
from moetrain.train.trainer import Trainer

_WARM_UP, _TIMED = 4, 10


class _Bench:
    def __init__(self, config: Config) -> None:
        self.steps = (config.train.steps if config.is_users("train.steps") else None) or _TIMED
        mine = {"train.steps": _WARM_UP + self.steps, "checkpoint.resume": "never"}
        is_named = config.origins.get("output_dir") != "model and data"
        if not (is_named and config.is_users("output_dir")):
            mine["output_dir"] = f"{config.output_dir}-bench"  # a run of training is left alone
        self.trainer = Trainer(config.filled(mine, "moetrain bench"))

    def fit(self) -> None:
        """Train and print the rates of one device, then the same as JSON."""
        trainer = self.trainer
        with garbage_collector_off():
            for number in range(_WARM_UP + self.steps):
                if number == _WARM_UP:
                    trainer.clock.stop()
                    trainer.clock.take()
                    trainer.world.barrier()
                    trainer.clock.start()
                trainer.train_step()
            trainer.clock.stop()
        row = trainer.clock.take()
        is_cuda = trainer.device.type == "cuda"
        name = torch.cuda.get_device_name(trainer.device) if is_cuda else "CPU"
        trainer.world.leave()
        if not trainer.world.is_main:
            return
        share = "" if row["mfu"] is None else f" ({row['mfu']:.1%} of the peak)"
        print(
            f"{trainer.world.size} x {name}, torch {torch.__version__}, each: "
            f"{row['tokens_per_second_per_device']:,.0f} tokens/s, "
            f"{row['tflops_per_device']:,.3g} TFLOP/s{share}, {row['memory_gib']:.1f} GiB; "
            f"{1e3 * (row['step_seconds'] or 0):,.1f} ms a step, the mean of {self.steps}"
        )
        print(json.dumps(row))


main = partial(_main, command="bench")

if __name__ == "__main__":
    leave(main())
