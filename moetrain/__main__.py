"""Runs ``python -m moetrain COMMAND``: the script ``moetrain`` where no script is installed."""

from moetrain.cli.main import run_script

if __name__ == "__main__":
    run_script()
