from moetrain.cli import interrupt_quietly

if __name__ == "__main__":
    interrupt_quietly()  # the imports below take a second
    from moetrain.cli.checkpoint import main
    from moetrain.cli.main import leave

    leave(main())
