"""What the page shows: an index with the numbers of every call, and chunks with their texts and tokens.

Invariant: an index entry and a chunk's entry are the same episode of the run's record; every call is in the index once.
The browser reads the index at once and a chunk when one of its episodes is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from recipe.dag.report.journal import run_name
from recipe.dag.report.jsonfile import to_json
from recipe.dag.report.run_folder import Run
from recipe.dag.report.viewer.graph import graph_of
from recipe.dag.report.viewer.vocabulary import vocabularies

PROBLEM = 2000
"""Characters of a problem in the index; an episode shows all of them."""
DIGITS = 4
"""Decimals of log-probs and other numbers per token."""
CALL = ("node", "agent", "policy", "turn", "round", "reward", "advantage", "seconds", "generation_seconds")
FLAGS = ("done", "unscored", "candidate", "candidates", "score", "generations", "usage", "replayed")
"""Fields of a call that are in the index only where they say something."""
TOOL = ("name", "status", "start_seconds", "seconds", "waited")
NOT_SHOWN = ("prompt_ids", "prompt_text")
"""Fields of a call that chunks lack: a prompt is a text of the chunk."""


class Payload:
    """Grows by one record after another."""

    def __init__(self) -> None:
        self.episodes: list[dict[str, Any]] = []
        """The index entries."""
        self.problems: list[dict[str, str]] = []
        self.chunks: list[list[Any]] = []
        """The sources of the episodes of a step and split, in the order of `episodes[i]["slot"]`."""
        self.tokens: dict[str, tuple[Mapping[str, Any], set[int]]] = {}
        """A call of each policy, and the token ids of all its calls."""
        self._agents: dict[str, None] = {}
        self._problem_numbers: dict[tuple[str, str], int] = {}
        self._chunk_numbers: dict[tuple[Any, str], int] = {}

    def add(self, record: Mapping[str, Any], source: Any) -> None:
        """source: by which the caller finds the record again."""
        key = (record.get("step"), record.get("split", "train"))
        chunk = self._chunk_numbers.setdefault(key, len(self.chunks))
        if chunk == len(self.chunks):
            self.chunks.append([])
        problem = _problem(record["sample"])
        number = self._problem_numbers.setdefault((problem["text"], problem["truth"]), len(self.problems))
        if number == len(self.problems):
            self.problems.append(problem | {"text": problem["text"][:PROBLEM], "key": _digest(problem)})
        place = {"problem": number, "chunk": chunk, "slot": len(self.chunks[chunk])}
        self.episodes.append(_entry(record, key) | place)
        self.chunks[chunk].append(source)
        for call in _calls(record):
            self._agents[call["agent"]] = None
            if call.get("response_ids"):
                self.tokens.setdefault(call["policy"], (call, set()))[1].update(call["response_ids"])

    def index(self, run: Run, effects: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the index. The agents are in the workflow's order; those that only the records have come last."""
        names = [agent["name"] for agent in run.workflow.get("agents", ())]
        return {
            "run": _about(run),
            "graph": graph_of(run.workflow),
            "agents": list(dict.fromkeys([*names, *self._agents])),
            "metrics": _columns(run.metrics),
            "problems": self.problems,
            "episodes": self.episodes,
            "effects": [{key: value for key, value in effect.items() if key != "episodes"} for effect in effects],
        }


def parts_of(run: Run, effects: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the page's data of a run and its records by the name of each part. effects: of changes to recorded
    episodes."""
    payload = Payload()
    for record in run.records:
        payload.add(record, record)
    parts = {
        "index": payload.index(run, effects),
        "vocabularies": vocabularies(run, payload.tokens),
        "continuations": [[_said(episode["calls"]) for episode in effect["episodes"]] for effect in effects],
    }
    return parts | {f"chunk-{number}": chunk_of(records) for number, records in enumerate(payload.chunks)}


def chunk_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"prompts": [each once], "episodes": [records, whose calls name their prompts]}."""
    prompts: dict[str, int] = {}
    episodes = [
        {
            **record,
            "calls": [_detail(call, prompts) for call in _calls(record)],
            "dropped": len(record.get("dropped") or ()),
        }
        for record in records
    ]
    return {"prompts": list(prompts), "episodes": episodes}


def _detail(call: Mapping[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    kept = {name: value for name, value in call.items() if name not in NOT_SHOWN}
    kept["prompt"] = prompts.setdefault(call.get("prompt_text", ""), len(prompts))
    kept["rollout_log_probs"] = _rounded(call.get("rollout_log_probs") or ())
    kept["token_columns"] = {name: _rounded(values) for name, values in (call.get("token_columns") or {}).items()}
    return kept


def _said(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return who said what."""
    names = ("node", "agent", "turn", "round")
    return [{name: call[name] for name in names} | {"text": call["completion"] or call["text"]} for call in calls]


def _calls(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the calls in the order of `Episode.all_calls`."""
    return [*record["calls"], *(record.get("dropped") or ())]


def _entry(record: Mapping[str, Any], key: tuple[Any, str]) -> dict[str, Any]:
    uid = str(record["uid"]).encode("utf-8", "replace").decode()  # an address has no halves of characters
    entry: dict[str, Any] = {"step": key[0] or 0, "split": key[1], "uid": uid, "index": record["index"]}
    entry |= {name: record.get(name) for name in ("outcome", "seconds", "turns", "ended_by", "attempts")}
    if record.get("fault"):
        entry["fault"] = str(record["fault"].get("boundary", "fault"))
    if flags := record.get("flags"):
        entry["flags"] = flags
    if fork := record.get("forked"):
        entry["forked"] = f"fork of {fork['from']} at {fork['at']}"
    entry["skips"] = [[skip["node"], skip["turn"], skip["round"]] for skip in record.get("skips") or ()]
    kept = len(record["calls"])
    entry["calls"] = [_numbers(call, dropped=number >= kept) for number, call in enumerate(_calls(record))]
    return entry


def _numbers(call: Mapping[str, Any], *, dropped: bool) -> dict[str, Any]:
    numbers = {name: call.get(name) for name in CALL}
    numbers |= {name: value for name in FLAGS if (value := call.get(name))}
    numbers["start"] = call.get("start_seconds", 0.0)
    numbers["stop"] = call.get("stop_reason", "")
    numbers["parts"] = call.get("reward_parts") or {}
    numbers["prompt_tokens"] = len(call.get("prompt_ids") or ())
    numbers["tokens"] = sum(call.get("response_mask") or ())
    if tools := call.get("tool_results"):
        numbers["tools"] = [{name: tool.get(name) for name in TOOL} for tool in tools]
    if not call.get("train", True):
        numbers["untrained"] = True
    return numbers | ({"dropped": True} if dropped else {})


def _problem(sample: Mapping[str, Any]) -> dict[str, str]:
    prompt, truth = sample.get("prompt", ""), sample.get("ground_truth")
    if isinstance(prompt, list):
        prompt = "\n\n".join(str(part.get("content", "")) for part in prompt if isinstance(part, Mapping))
    source = sample.get("data_source")
    return {"text": str(prompt), "truth": "" if truth is None else str(truth), "source": str(source or "")}


def _digest(problem: Mapping[str, str]) -> str:
    """Return what two runs have in common if the whole text and the ground truth are the same."""
    return blake2b(to_json([problem["text"], problem["truth"]]), digest_size=8).hexdigest()


def _about(run: Run) -> dict[str, Any]:
    launch, workflow = run.launch, run.workflow
    return {
        "name": run_name(run.folder / "episodes.jsonl"),
        "workflow": workflow.get("dag_id"),
        "description": workflow.get("description"),
        "algorithm": workflow.get("algorithm") or {},
        "policies": {name: _policy(policy, run) for name, policy in (workflow.get("policies") or {}).items()},
        **{name: launch.get(name) for name in ("command", "seed", "started", "versions", "machine", "checkout")},
        "summary": run.summary,
    }


def _policy(policy: Mapping[str, Any], run: Run) -> dict[str, Any]:
    path = (policy.get("model") or {}).get("path")
    if path and "${" in path:  # in the shipped workflows the launcher's MODEL_PATH
        path = run.config.get("model_path")
    return {"model": path, "frozen": bool(policy.get("frozen")), "api": policy.get("api") is not None}


def _columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"steps": [...], "series": {key: [value or None per step]}}."""
    keys = dict.fromkeys(key for line in metrics for key in line if key != "step")
    series = {key: [line.get(key) for line in metrics] for key in keys}
    return {"steps": [line["step"] for line in metrics], "series": series}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]
