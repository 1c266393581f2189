import sys

from moetrain.cli.train import run_jobs

if __name__ == "__main__":
    sys.exit(run_jobs())
