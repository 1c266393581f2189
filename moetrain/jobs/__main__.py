from moetrain.cli.main import leave
from moetrain.cli.train import run_jobs

if __name__ == "__main__":
    leave(run_jobs())
