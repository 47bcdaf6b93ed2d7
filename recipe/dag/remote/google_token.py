"""Access tokens of Google's Application Default Credentials, through google-auth.

Invariant: a token is renewed before it expires, or once a server has refused it, by one thread for all requests, never
on the event loop. Without the package, or without credentials, the first request is a UserError.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.tools.address import KEYS

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MARGIN = timedelta(minutes=5)
"""A token that expires within it is renewed, since a request may take that long."""


class GoogleTokens:
    """`where`: the policy, for messages."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._credentials: Any = None

    async def get(self, refused: str | None = None) -> str:
        """Return a valid token other than `refused`. Raises UserError, and ModelServerFault for a failure that may
        pass."""
        if self._is_good(refused):
            return self._credentials.token
        return await asyncio.to_thread(self._renewed, refused)

    def _is_good(self, refused: str | None) -> bool:
        known = self._credentials
        if known is None or not known.token or known.token == refused:
            return False
        # naive, in UTC; None for a token without an end
        return known.expiry is None or known.expiry.replace(tzinfo=UTC) - datetime.now(UTC) > MARGIN

    def _renewed(self, refused: str | None) -> str:
        try:
            import google.auth
            from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
            from google.auth.transport.requests import Request
        except ImportError:
            raise UserError(
                f"{self._where}: Google's credentials need a package: pip install 'verl-dag[vertex]'; or export an "
                "access token in CLOUDSDK_AUTH_ACCESS_TOKEN"
            ) from None
        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials, _ = google.auth.default(scopes=[SCOPE])
                if not self._is_good(refused):  # another request may have renewed it
                    self._credentials.refresh(Request())
            except DefaultCredentialsError as error:
                raise UserError(
                    f"{self._where}: no credentials of Google ({_line(error)}); set GOOGLE_APPLICATION_CREDENTIALS to "
                    "the file of a service account, or run: gcloud auth application-default login"
                ) from None
            except GoogleAuthError as error:
                if error.retryable:
                    raise ModelServerFault(f"the token cannot be renewed: {_line(error)}", where=self._where) from None
                raise UserError(
                    f"{self._where}: Google renews no token ({_line(error)}); renew the credentials"
                ) from None
            KEYS.add(self._credentials.token)
            return self._credentials.token


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
