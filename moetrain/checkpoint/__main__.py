import sys

from moetrain.cli.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
