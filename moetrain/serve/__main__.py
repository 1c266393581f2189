from moetrain.cli.main import leave
from moetrain.cli.serve import main

if __name__ == "__main__":
    leave(main())
