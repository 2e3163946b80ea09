"""`python -m aserve`: the command line."""

from aserve.program import main

if __name__ == "__main__":
    main()
