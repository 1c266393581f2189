import sys

from moetrain.cli.rl import run

if __name__ == "__main__":
    sys.exit(run())
