"""`python -m aserve`: the command line."""

from aserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
