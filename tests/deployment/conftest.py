"""Deployments of mortal processes: one that the tests share, others of a module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deploying import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Any:
    """plain(prompt, max_tokens): what is right."""
    from deploying import Plain

    return Plain(model)


@pytest.fixture(scope="session")
def deploy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """deploy(num_prefill, num_decode, **options) -> a Deployment, ended with the session."""
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    from deploying import Deployment, Nursery

    nursery, made = Nursery(), []

    def start(num_prefill: int, num_decode: int, **options: Any) -> Deployment:
        place = tmp_path_factory.mktemp("deployment")
        made.append(Deployment(nursery, place, model, num_prefill, num_decode, **options))
        return made[-1]

    yield start
    for deployment in made:
        deployment.close()
    nursery.close()


@pytest.fixture(scope="session")
def shared(deploy: Callable[..., Any]) -> Any:
    return deploy(2, 2)


@pytest.fixture
def deployment(shared: Any, plain: Any) -> Iterator[Any]:
    """Two prefill and two decode workers. After each test no survivor holds anything, they serve;
    and so does who was started for those that were killed."""
    from deploying import assert_right

    shared.no_orders()
    yield shared
    shared.no_orders()
    if not shared.router.alive:
        shared.whole()
    shared.settle()
    while True:  # by the survivors, then by all
        prompt = shared.prompt(40)
        assert_right(shared.ask(prompt), plain(prompt, 16))
        if shared.is_whole:
            break
        shared.whole()
