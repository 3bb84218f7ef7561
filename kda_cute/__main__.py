"""`python -m kda_cute`: the command line where the script `kda-cute` isn't installed."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="kda-cute")
