"""Run atlas: `atlas ...` and `python -m atlas_cli ...`."""

from atlas_cli.cli.app import run

if __name__ == "__main__":
    run()
