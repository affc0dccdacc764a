"""click's runner for tests, with stdout and stderr apart in every release."""

from __future__ import annotations

from click.testing import CliRunner


def click_runner():
    try:
        return CliRunner(mix_stderr=False)  # click before 8.2, the last for Python 3.9
    except TypeError:
        return CliRunner()
