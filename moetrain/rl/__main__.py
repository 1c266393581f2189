from moetrain.cli.main import leave
from moetrain.cli.train import run_rl

if __name__ == "__main__":
    leave(run_rl())
