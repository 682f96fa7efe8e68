"""python -m jaxppo.train --config FILE [--section.setting VALUE ...]: runs PPO."""

import sys
from collections.abc import Callable, Sequence

from jaxppo.checks import check
from jaxppo.cli import load_config
from jaxppo.config import Config, UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 0 at the end of the run, 2 with one line on stderr for a mistake in what was given."""
    run_or_exit(_train, sys.argv[1:] if arguments is None else arguments)


def run_or_exit(command: Callable[[Config], None], arguments: Sequence[str]) -> None:
    try:
        command(load_config(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _train(config: Config) -> None:
    check(config)  # here already: the import below takes seconds
    from jaxppo.run.trainer import train

    train(config)


if __name__ == "__main__":
    main()
