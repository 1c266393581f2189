from moetrain.cli.main import leave
from moetrain.cli.train import main

if __name__ == "__main__":
    leave(main())
