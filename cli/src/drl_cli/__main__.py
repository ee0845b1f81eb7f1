"""``python -m drl_cli`` is ``drl``."""

from drl_cli.main import run

if __name__ == "__main__":
    run()
