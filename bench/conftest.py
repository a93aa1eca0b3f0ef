"""Run each pytest benchmark once, to show that it works, unless ``--benchmark-enable`` asks for times."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "benchmark_enable") and not config.option.benchmark_enable:
        config.option.benchmark_disable = True
