import sys

from moetrain.cli.jobs import run

if __name__ == "__main__":
    sys.exit(run())
