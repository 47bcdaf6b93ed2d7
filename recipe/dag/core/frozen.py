"""The base of everything that is parsed from a workflow.

Invariant: an object does not change after it was checked, and an unknown key is an error.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
