"""The command line: ``python -m jaxamp --help``."""

from jaxamp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
