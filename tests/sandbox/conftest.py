"""Requests to the server that all tests share which do not change it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from recipe.sandbox.launch import LocalSandbox


def over_socket(path: str) -> httpx.Client:
    """Return a client of the server at a UNIX socket, without a token."""
    transport = httpx.HTTPTransport(uds=path)
    return httpx.Client(transport=transport, base_url="http://localhost", trust_env=False, timeout=60)


class Caller:
    """Requests to one server, with its token."""

    def __init__(self, local: LocalSandbox):
        self.local = local

    def __call__(self, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.local.token}", **options.pop("headers", {})}
        if body is not None and not isinstance(body, bytes | Iterator):
            headers.setdefault("Content-Type", "application/json")
            body = json.dumps(body).encode()
        with over_socket(self.local.socket) as http:
            return http.request(method, path, content=body, headers=headers, **options)

    def connect(self) -> httpx.AsyncClient:
        """Return a client for concurrent requests."""
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self.local.socket),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {self.local.token}"},
            trust_env=False,
            timeout=60,
        )

    def run(self, code: str, **fields: object) -> dict[str, Any]:
        """Return the answer of /run_code, whose status must be 200."""
        response = self("POST", "/run_code", {"code": code, "language": "python", **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def stdout(self, code: str, **fields: object) -> str:
        return self.run(code, **fields)["run_result"]["stdout"]


@pytest.fixture(scope="session")
def call(local) -> Caller:
    return Caller(local)


@pytest.fixture(scope="session")
def caller() -> Callable[[LocalSandbox], Caller]:
    """Return the class, for tests that start their own server."""
    return Caller


@pytest.fixture(scope="session", name="over_socket")
def over_socket_fixture() -> Callable[[str], httpx.Client]:
    return over_socket


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """Return the environment of child processes that import the same packages as the tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
