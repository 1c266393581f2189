import sys

from moetrain.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
