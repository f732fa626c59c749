"""`python -m elastictrain` is the command `elastictrain`."""

from elastictrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
