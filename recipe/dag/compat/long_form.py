"""The long form of nodes, with siiRL's fields (`node_id`, `node_role`, `agent_options` ...), read as the form of the
schema: `{id: check, agent: verifier, after: solve, hooks: hooks.py}`.

Invariant: each part of the result has the position of the field that it was read from, so that a mistake is reported
under the key that the user typed. A file without such fields is returned as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import KeyPath
from recipe.dag.core.suggestion import closest, did_you_mean, listing
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.parse_model import choice, show_value
from recipe.dag.workflow.source import Origin, Source, nowhere

FIELDS = {"node_id": "id", "dependencies": "after", "executable_kwargs": "args"}
"""Field of a node -> key of the schema, for fields whose values are the same there."""
OPTIONS = {
    "process_path": "hooks",
    "pre_process_kwargs": "prompt_options",
    "post_process_kwargs": "parse_options",
    "env_path": "env",
    "env_route": "env_route",
    "obs_with_env": "sees_env",
    "rewards_with_env": "env_pays",
}
"""The same for entries of `agent_options`."""
LONG = (*FIELDS, "node_type", "node_role", "only_forward_compute", "agent_group", "executable_ref", "agent_options")
"""The fields that only the long form has."""
SHARED = ("config", "scope", "when", "vote", "candidates", "policy")
"""The fields that both forms have."""
NODE_FIELDS = (*LONG, *SHARED)


NodeType = Literal["MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE"]
INFERENCE, TRAINING, COMPUTE = TYPES = get_args(NodeType)
ROLES = {
    "ROLLOUT": (INFERENCE, "agent"),
    "VOTE": (COMPUTE, "vote"),
    "REWARD": (COMPUTE, "reward"),
    "DEFAULT": (COMPUTE, "compute"),
    "ADVANTAGE": (COMPUTE, "train"),
    "ACTOR": (TRAINING, "train"),
    "CRITIC": (TRAINING, "train"),
    "REFERENCE": (TRAINING, "train"),
}
"""Role of a node -> (its type, the key of the schema that gives a node this kind)."""
STEPS = {
    "ADVANTAGE": ("advantage", "advantage"),
    "ACTOR": ("update", "old_log_probs"),
    "CRITIC": ("critic_update", "values"),
    "REFERENCE": ("reference", "reference"),
}
"""Role of a training node -> its step, and its step with `only_forward_compute`."""


def is_siirl(source: Source) -> bool:
    """Return whether the file is one of siiRL: it has nodes without `agents`, `policies` and this project's keys."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not nodes or {"agents", "policies"} & source.data.keys():
        return False
    own = Node.model_fields.keys() - set(NODE_FIELDS) | {"workflow", "policy"}
    return not any(isinstance(node, dict) and own & node.keys() for node in nodes)


def is_long(node: Any) -> bool:
    return isinstance(node, dict) and any(key in LONG for key in node)


def hint_at_short_form(source: Source) -> str | None:
    """Return a hint if nodes of the file are written in the long form; None otherwise, and for siiRL's files."""
    if is_siirl(source) or not any(map(is_long, _list(source.data.get("nodes")))):
        return None
    return "hint: nodes have a shorter form, `{id: ..., agent: ..., after: ...}` (docs/workflows.md, `verl-dag import`)"


def in_short_form(source: Source, *, included: bool = False) -> Source:
    """Return the source with every node in the form of the schema, or the source itself if all nodes are. `included`:
    it is a sub-workflow, which may have no agents."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not any(map(is_long, nodes)):
        return source
    result = Source(source.file, dict(source.data), problems=source.problems, warnings=source.warnings)
    result.unread |= source.unread
    result.origins[()] = Origin(source, ())
    result.data["nodes"] = list(nodes)
    agents = _list(source.data.get("agents"))
    for index, node in enumerate(nodes):
        if is_long(node):
            path: KeyPath = ("nodes", index)
            read = read_node(node, agents if agents or included else None)
            result.data["nodes"][index] = read.node
            for at, message, key in read.mistakes:
                source.problems.append(source.problem((*path, *at), message, key=key))
            if read.mistakes or read.incomplete:
                result.unread.add(str(read.node.get("id", "")))
            for key, moved in read.moved.items():
                origin = nowhere(source, path) if moved is None else Origin(source, (*path, *moved))
                result.origins[(*path, key)] = origin
    return result


def short_keys(keys: Sequence[str], node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys below a node, such as ("agent_options", "env_path"), as the schema has them. `node`: in the
    schema's form. Raises UserError for a field that no key of the schema corresponds to."""
    first, *rest = keys
    if first == "agent_options" and rest:
        return (OPTIONS.get(rest[0], rest[0]), *rest[1:])
    if first == "executable_ref" and (function := next((key for key in ("reward", "compute") if key in node), None)):
        return (function, *rest)
    if first in FIELDS or first not in LONG:
        return (FIELDS.get(first, first), *rest)
    if first == "agent_group":
        raise UserError("write `agent=NAME`, or `policy=NAME` of a training node")
    raise UserError("set the key that gives the node its kind: `agent`, `vote`, `reward`, `compute` or `train`")


def long_fields(key: str) -> list[str]:
    """Return the fields of the long form whose values a key of the schema has."""
    fields = {**FIELDS, **OPTIONS, "executable_ref": "reward"}
    return [field for field, short in fields.items() if short == key]


def read_node(node: Mapping[str, Any], agents: list[Any] | None) -> NodeReader:
    """Return a node of the long form, read. `agents`: the agents of its file, not yet checked; None if the file has
    none, which is reported elsewhere."""
    reader = NodeReader(node, agents)
    reader.read()
    return reader


@dataclass(slots=True)
class NodeReader:
    long: Mapping[str, Any]
    agents: list[Any] | None
    node: dict[str, Any] = field(default_factory=dict)
    """The node in the form of the schema."""
    moved: dict[str, KeyPath | None] = field(default_factory=dict)
    """Key of `node` -> the field that it was read from; None if it follows from other fields."""
    mistakes: list[tuple[KeyPath, str, bool]] = field(default_factory=list)
    """(field, error message, whether the message is about the key and not its value)."""
    incomplete: bool = False
    """Whether the node lacks something that is reported elsewhere."""

    def read(self) -> None:
        included = "workflow" in self.long  # a sub-workflow has no kind, and no other field of the long form
        left = FIELDS if included else LONG
        self.node = {key: value for key, value in self.long.items() if key not in left and not self._is_misspelt(key)}
        for key, short in FIELDS.items():
            self._move((key,), short)
        if included:
            return
        self._read_options()
        role = self._role()
        if role is not None:
            self._read_agent(role)
            self._read_function(role)
            self._read_step(role)

    def report(self, at: KeyPath, message: str, *, key: bool = False) -> None:
        self.mistakes.append((at, message, key))

    def put(self, key: str, value: Any, moved: KeyPath | None) -> None:
        self.node[key], self.moved[key] = value, moved

    def _is_misspelt(self, key: str) -> bool:
        """Report a key that is probably a field of this form."""
        meant = None if key in Node.model_fields or key == "workflow" else closest(key, (*LONG, *Node.model_fields))
        if meant in LONG:
            self.report((key,), f"unknown key; did you mean `{meant}`?", key=True)
        return meant in LONG

    def _move(self, path: tuple[str, ...], short: str) -> None:
        """Put the value of a field under its key of the schema."""
        holder: Any = self.long
        for key in path:
            if key not in holder:
                return
            holder = holder[key]
        if short in self.long and path != (short,):
            self.report((short,), f"this sets the same as `{'.'.join(path)}`; remove one of them", key=True)
        else:
            self.put(short, holder, path)

    def _read_options(self) -> None:
        options = self.long.get("agent_options", {})
        if not isinstance(options, dict):
            self.report(("agent_options",), f"expected a mapping, got {show_value(options)}")
            return
        for key in options:
            path = ("agent_options", key)
            if key in OPTIONS:
                self._move(path, OPTIONS[key])
            elif (meant := closest(key, OPTIONS)) is not None or key in Node.model_fields:
                hint = f"did you mean `{meant}`?" if meant else "this is a key of the node itself"
                self.report(path, f"unknown key; {hint}", key=True)
            else:
                self.put(key, options[key], path)  # an unknown key of the schema, too

    def _role(self) -> str | None:
        """Return the node's role; None if it cannot be read, which is reported."""
        role, kind = self._name("node_role"), self._name("node_type")
        if kind is not None and kind not in TYPES:
            self.report(("node_type",), choice(self.long["node_type"], TYPES))
            return None
        if role is None:
            role = self._implied_role()
        if not isinstance(role, str) or role not in ROLES:
            self.report(("node_role",), choice(self.long["node_role"], list(ROLES)))
            return None
        if kind not in (None, ROLES[role][0]):
            roles = listing(other for other in ROLES if ROLES[other][0] == kind)
            at = "node_role" if "node_role" in self.long else "node_type"
            self.report((at,), f"a {kind} node cannot be {role}; its roles are {roles}")
            return None
        return role

    def _implied_role(self) -> str:
        """Return the role of a node without `node_role`. A training node may name its agent, too."""
        if (step := self.long.get("train")) is not None:
            return next((role for role, steps in STEPS.items() if step in steps), "ACTOR")
        return next((role for role in ROLES if self.long.get(ROLES[role][1]) is not None), "DEFAULT")

    def _name(self, key: str) -> Any:
        """Return the value of a field that holds a name, in capitals."""
        value = self.long.get(key)
        return value.upper() if isinstance(value, str) else value

    def _read_agent(self, role: str) -> None:
        """Read `agent` or `agent_group`: the agent of a rollout node, the policy of a training node."""
        named = [key for key in ("agent", "agent_group") if key in self.long]
        if len(named) > 1:
            self.report(("agent",), "set `agent` or `agent_group`, not both; remove one", key=True)
        elif named and role not in ("ROLLOUT", *STEPS):
            self.report((named[0],), f"a {role} node does not belong to one agent; remove `{named[0]}`", key=True)
        elif role == "ROLLOUT":
            self._read_player(named)
        elif role in STEPS and named:
            self._read_trained(named[0])

    def _read_player(self, named: list[str]) -> None:
        if not named and len(self.agents or ()) > 1:
            names = listing(self._agent_names())
            message = f"with several agents, a ROLLOUT node must name its agent: add `agent: ...`, one of {names}"
            self.report((), f"{message} (or its index, `agent_group: ...`)")
        elif named != ["agent"]:
            agent = self._agent_of_group()
            if (name := _text(agent, "name")) is not None:
                self.put("agent", name, (named[0],) if named else None)
            else:
                self.incomplete = True

    def _read_trained(self, key: str) -> None:
        """Put the policy of the agent that a training node names under `policy`."""
        name = self.node.pop("agent", None)
        agent = next((agent for agent in self.agents or () if _text(agent, "name") == name), None)
        if key == "agent_group":
            agent = self._agent_of_group()
        elif agent is None and self.agents is not None:
            self.report((key,), f"no agent `{name}`{did_you_mean(str(name), self._agent_names())}")
        policy = _text(agent, "policy")
        if policy is not None and self.long.get("policy", policy) != policy:
            message = f"agent `{_text(agent, 'name')}` has policy `{policy}`; name the agent or the policy, not both"
            self.report(("policy",), message)
        elif policy is not None and "policy" not in self.long:
            self.put("policy", policy, (key,))

    def _agent_names(self) -> list[str]:
        return [name for name in (_text(agent, "name") for agent in self.agents or ()) if name]

    def _agent_of_group(self) -> Any:
        """Return the agent at the index `agent_group`, or at 0; None if there is none, which is reported."""
        group = self.long.get("agent_group", 0)
        at = ("agent_group",) if "agent_group" in self.long else ()
        if not isinstance(group, int) or isinstance(group, bool):
            self.report(at, f"expected a whole number, got {show_value(group)}")
        elif self.agents is None:
            self.incomplete = True
        elif not self.agents:
            self.report(at, "add `agent: NAME`; `agent_group` does not name an agent of this file")
        elif not 0 <= group < len(self.agents):
            last = len(self.agents) - 1
            message = f"no agent {group}; agent_group is an index from 0 to {last}, or write `agent: name`"
            self.report(at, message)
        else:
            return self.agents[group]
        return None

    def _read_function(self, role: str) -> None:
        key, function = ROLES[role][1], self.long.get("executable_ref")
        if role in ("REWARD", "DEFAULT"):
            if function is None and self.long.get(key) is None:
                self.report((), f"a {role} node needs `executable_ref: file.py:function`")
            elif function is not None:
                self._move(("executable_ref",), key)
        elif function is not None:
            hint = "; a class goes under `hooks`" if role == "ROLLOUT" else "; remove it"
            message = f"only REWARD and DEFAULT nodes read this, and this is a {role} node{hint}"
            self.report(("executable_ref",), message, key=True)
        if role == "VOTE" and self.long.get("vote") is None:
            self.put("vote", {}, ("node_role",))

    def _read_step(self, role: str) -> None:
        forward = self.long.get("only_forward_compute", False)
        if not isinstance(forward, bool):
            self.report(("only_forward_compute",), f"expected true or false, got {show_value(forward)}")
        elif forward and self.long.get("train") is not None:
            self.report(("train",), "this sets the same as `only_forward_compute`; remove one of them", key=True)
        elif forward and ROLES[role][0] != TRAINING:
            self.report(("only_forward_compute",), "only MODEL_TRAIN nodes read this; remove it", key=True)
        elif role in STEPS and self.long.get("train") is None:
            self.put("train", STEPS[role][forward], ("node_role",))


def _text(data: Any, key: str) -> str | None:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
