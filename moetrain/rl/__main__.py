import sys

from moetrain.cli.train import run_rl

if __name__ == "__main__":
    sys.exit(run_rl())
