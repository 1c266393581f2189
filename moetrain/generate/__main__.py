from moetrain.cli.generate import main
from moetrain.cli.main import leave

if __name__ == "__main__":
    leave(main())
