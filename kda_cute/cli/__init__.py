"""The command line `kda-cute`: a module per command, imported only when that command is asked for,
so that `kda-cute --help` and `kda-cute doctor` need neither a GPU nor the DSL.

Exit codes: 0, done and all is well; 1, done and something is not (a miss, a regression, a broken
budget); 2, it could not be done (bad arguments, nothing to run on).
"""

from __future__ import annotations

import importlib

import click

# Name -> what it is for; the command is the function of that name in the module of that name.
COMMANDS = {
    "bench": "Time the kernels, compare two runs, and report.",
    "certify": "Measure the accuracy of kernels, reference and peers in every regime.",
    "compile": "Compile kernels ahead of time, for this or another machine.",
    "doctor": "What runs here, what doesn't, and why.",
    "layouts": "List, show, audit, draw and compare shared-memory layouts.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{name}")
        return getattr(module, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kda-cute")
def main() -> None:
    """KDA (Kimi Delta Attention) training kernels for NVIDIA Hopper."""
