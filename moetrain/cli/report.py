"""``moetrain report FOLDER``: write ``report.html`` of a run, which may still be training."""

from collections.abc import Sequence
from pathlib import Path

from moetrain.cli.main import Parser, command, leave
from moetrain.config import ConfigError
from moetrain.config.sources import shortened


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser("report", "Write report.html of a run, a page without a server.")
    parser.add_argument("folder", type=Path, help="the output folder of the run")
    folder = parser.parse_args(argv).folder
    from moetrain.train.report import write_report  # imports numpy

    try:
        print(write_report(folder))
    except (OSError, ValueError) as error:
        problem = f"{shortened(str(folder))} has no run that can be read: {error}"
        raise ConfigError("report", f"{problem}; give the output_dir of one") from None


if __name__ == "__main__":
    leave(main())
