"""The lines of a run, on the terminal and in metrics.jsonl."""

import math
from collections.abc import Mapping
from pathlib import Path

from moetrain.config import LogSection
from moetrain.train.metrics import MetricsLog


class Reporter:
    """Writes the lines of a run on the main rank; other ranks write nothing.

    Attributes:
        log: metrics.jsonl and the terminal; None: it is not open, or this is another rank.
        loss: of the newest line that has one; None: it was not finite, or there was none.
    """

    def __init__(self, folder: Path, settings: LogSection, *, is_main: bool) -> None:
        self.folder, self.settings, self.is_main = folder, settings, is_main
        self.log: MetricsLog | None = None
        self.loss: float | None = None

    def open(self, total_steps: int, step: int) -> None:
        """Open metrics.jsonl, without lines after ``step``, and show progress to the terminal."""
        if self.is_main:
            self.log = MetricsLog(self.folder, self.settings, total_steps, step)

    def close(self) -> None:
        """Close the file. It is known by ``log.path`` afterwards too."""
        if self.log is not None:
            self.log.close()

    def say(self, text: str) -> None:
        """Print a line on the main rank, while the run is open."""
        if self.log is not None:
            self.log.say(text)

    def write(self, step: int, row: Mapping[str, float | None]) -> dict[str, float | None]:
        """Write the values of a step or an evaluation; return them, with None if not finite."""
        clean = {k: v if v is not None and math.isfinite(v) else None for k, v in row.items()}
        self.loss = clean.get("loss", self.loss)
        if self.log is not None:
            self.log.log(step, clean)
        return clean

    def end_progress(self) -> None:
        """Leave the progress bar where it is; later lines are printed below it."""
        if self.log is not None:
            self.log.end_progress()
