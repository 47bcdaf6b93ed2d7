"""Like test_workflow_errors: one broken file per kind of mistake in loops, branches, votes, envs, critics and the
training chain with critics."""

from __future__ import annotations

import pytest

GOOD = """\
dag_id: demo
agents:
  - {name: left, policy: one}
  - {name: right, policy: two}
  - {name: judge, policy: two}
policies:
  one: {model: {path: a}, critic: {}, train_cycle: 5}
  two: {model: {path: b}, critic: {share: one}, train_cycle: 5}
envs:
  math: {path: env.py:Env}
  code: {path: env.py:Sized, kwargs: {size: 3}}
algorithm: {estimator: gae_chain}
loops:
  debate: {nodes: [pro, contra], max_rounds: 3, until: {agree: [pro, contra]}}
nodes:
  - {id: draft, agent: left}
  - {id: pro, agent: left, after: [draft]}
  - {id: contra, agent: right, after: [draft]}
  - {id: note, compute: hooks.py:note, after: [pro]}
  - {id: vote, vote: {key: answer}, after: [pro, contra]}
  - {id: verdict, agent: judge, after: [vote, note],
     env: [math, code], env_route: data_source, when: {node: vote, key: share, at_most: 0.5}}
  - {id: score, reward: rewards.py:score, after: [verdict]}
"""
CODE = GOOD[GOOD.index("  code: {") : GOOD.index("algorithm")]
WHEN = "{node: vote, key: share, at_most: 0.5}"
UNTIL = "{agree: [pro, contra]}"
ONE = "one: {model: {path: a}, critic: {}, train_cycle: 5"
ROUTE = "env: [math, code], env_route: data_source"


def step(name, train, policy, *after):
    owner = f"policy: {policy}, " if policy else ""
    return f"  - {{id: {name}, train: {train}, {owner}after: [{', '.join(after)}]}}\n"


FIXED = ("old_one", "old_two", "values", "adv")
TRAIN = GOOD + "".join(
    (
        step("old_one", "old_log_probs", "one", "score"),
        step("old_two", "old_log_probs", "two", "score"),
        step("values", "values", "one", "score"),
        step("adv", "advantage", "", "score", "values"),
        step("learn", "critic_update", "one", *FIXED),
        step("up_one", "update", "one", *FIXED),
        step("up_two", "update", "two", *FIXED),
    )
)
OWN_CRITICS = GOOD.replace("{share: one}", "{}").replace("gae_chain", "mappo")
"""Models may have different vocabularies, and then no common critic."""
LEARN = step("learn", "critic_update", "one", *FIXED)

CONDITIONS = [
    ("no subject", (WHEN, "§{}"), "a condition asks about one of `node`, `env`"),
    ("two subjects", ("{node: vote,", "{node: vote, §sample: level,"), "one subject, here `node`"),
    ("no test", (WHEN, "§{node: vote, key: share}"), "`node` needs a test: one of `equals`"),
    ("two tests", ("at_most: 0.5}", "at_most: 0.5, §at_least: 0.1}"), "one test, here `at_most`"),
    ("key of a sample", (WHEN, "{sample: level, §key: x, equals: 3}"), "`key` has no effect next to `sample`"),
    ("key typo", ("{node: vote, key", "{node: vote, §kee"), "did you mean `key`?"),
    ("unknown node", ("{node: vote", "{node: §vot"), "no node `vot`; did you mean `vote`?"),
    ("reward asked", ("{node: vote", "{node: §score"), "which runs after the episode"),
    ("late node", ("after: [pro]}", "after: [pro], when: {node: §vote, exists: true}}"),
     "`vote` has not run when `note` asks about it"),
    ("late until", (UNTIL, "{node: §verdict, exists: true}"), "`verdict` has not run when loop `debate` asks"),
    ("env of none", (WHEN, "{env: §draft, key: level, equals: 1}"), "`draft` does not step an env; `verdict` does"),
    ("env without key", ("until: {agree: [pro, contra]}", "until: §{env: pro, equals: 1}"),
     ("agent: left, after", "agent: left, env: math, after"), "needs `key: name`"),
    ("size of a text", (WHEN, "{node: vote, §at_least: 1}"), "`at_least` needs a number"),
    ("regular expression", (WHEN, "{node: vote, matches: §'('}"), "not a regular expression"),
    ("phase", (WHEN, "{phase: §test}"), "expected one of `training`, `validation`, got 'test'"),
    ("phase with a test", (WHEN, "{phase: training, §equals: 1}"), "`phase` needs no test"),
    ("phase with a key", (WHEN, "{phase: training, §key: x}"), "`key` has no effect next to `phase`"),
    ("sample path", (WHEN, "{sample: §a..b, equals: 3}"), "write a path into the sample"),
    ("one of none", (WHEN, "{node: vote, key: a, one_of: §[]}"), "never met"),
    ("agree of one", (UNTIL, "{agree: §[pro]}"), "needs at least 2 nodes"),
    ("agree twice", (UNTIL, "{agree: [pro, §pro]}"), "`pro` is listed twice"),
    ("agree of a vote", (WHEN, "{agree: [pro, §vote]}"), "name those nodes instead"),
    ("agree with a test", (UNTIL, "{agree: [pro, contra], §equals: x}"), "`agree` needs no test"),
    ("join of nothing", (WHEN, "{all_of: §[]}"), "at least 1 condition"),
    ("inside a join", (WHEN, "{any_of: [{sample: a, equals: 1}, {none_of: [{node: §vott, exists: true}]}]}"),
     "when.any_of[1].none_of[0].node: no node `vott`"),
    ("a join with a test", (WHEN, "{all_of: [{sample: a, equals: 1}], §equals: x}"), "`all_of` needs no test"),
    ("a list to equal", (WHEN, "{node: vote, key: a, equals: §[x]}"), "expected text, a number, true or false"),
    ("when of a reward", ("{id: score,", "{§when: {sample: a, exists: true}, id: score,"), "compute nodes read this"),
]  # fmt: skip

LOOPS = [
    ("unknown node", ("nodes: [pro, contra]", "nodes: [§prro, pro, contra]"), "no node `prro`; did you mean `pro`?"),
    ("twice", ("nodes: [pro, contra]", "nodes: [pro, contra, §pro]"), "`pro` is listed twice"),
    ("two loops", ("nodes:\n", "  again: {nodes: [§contra], max_rounds: 2}\nnodes:\n"), "is already in loop `debate`"),
    ("reward inside", ("nodes: [pro, contra]", "nodes: [pro, contra, §score]"), "nodes of the episode only"),
    ("no rounds", ("max_rounds: 3", "max_rounds: §0"), "at least 1, got 0"),
    ("no bound", ("loops:\n  debate: {nodes: [pro, contra], max_rounds: 3", "loops:\n  debate: §{nodes: [pro, contra]"),
     "loops.debate.max_rounds: missing"),
    ("one round", ("max_rounds: 3, until", "max_rounds: 1, §until"), "`until` has no effect with one round"),
    ("no nodes", ("nodes: [pro, contra], max", "nodes: §[], max"), "a loop without nodes"),
    ("key typo", ("max_rounds: 3", "§max_round: 3"), "did you mean `max_rounds`?"),
    ("bad name", ("  debate:", "  §de bate:"), "`de bate` is not a valid name"),
    ("none", (GOOD[GOOD.index("loops:"):GOOD.index("nodes:\n")], "loops: §{}\n"), "must not be empty; remove it"),
    ("between", ("{nodes: [pro, contra], max_rounds: 3, until: {agree: [pro, contra]}}",
     "{§nodes: [pro, verdict], max_rounds: 3}"), "`note` depends on a node of this loop"),
]  # fmt: skip

VOTES = [
    ("single", ("after: [pro, contra]", "after: §[pro]"), "at least 2 nodes"),
    ("of a function", ("after: [pro, contra]", "after: [pro, contra, §note]"), "counts rollout nodes"),
    ("vote of a rollout", ("agent: left}", "agent: left, §vote: {}}"), "`agent` and `vote` give it two"),
    ("ties", ("vote: {key: answer}", "vote: {ties: §last}"), "expected one of `first`, `none`, got 'last'"),
    ("function of a vote", ("vote: {key: answer}", "vote: {key: answer}, §args: {}"), "this is a vote node"),
    ("options of a vote", ("vote: {key: answer}", "vote: {}, §sees_env: true"), "only rollout nodes"),
    ("compute without function", ("- {id: note", "- §{id: note"), ("compute: hooks.py:note, ", ""),
     "the node has no kind; add `agent:`"),
    ("compute's arguments", ("hooks.py:note", "§rewards.py:nothing"), "must take the positional arguments `context`"),
    ("compute's kwargs", ("hooks.py:note,", "hooks.py:note, args: {§lenght: 3},"), "mean `length`?"),
    ("compute after reward", ("after: [pro]}", "after: [§score]}"),
     (", note]", "]"), "runs inside the episode, it cannot depend on `score`"),
]  # fmt: skip

ENVS = [
    ("no route", (ROUTE, "§env: [math, code]"), "`env_route: <path"),
    ("route of one", (ROUTE, "env: math, §env_route: data_source"), (CODE, ""), "fewer than two envs"),
    ("unknown name", ("[math, code]", "[math, code, §cod]"), "there is no `cod` under `envs`; did you mean `code`?"),
    ("listed twice", ("[math, code]", "[math, code, §math]"), "`math` is listed twice"),
    ("unused", ("envs:\n", "envs:\n  §spare: {path: env.py:Env}\n"), "no node steps env `spare`"),
    ("empty route", ("data_source", "§extra..env"), "write a path into the sample"),
    ("class", ("env.py:Sized", "§env.py:Sizd"), "did you mean `Sized`?"),
    ("kwargs", ("kwargs: {size: 3}", "kwargs: {size: 3, §sise: 4}"), "__init__ takes no `sise`; did you mean `size`?"),
    ("missing kwargs", ("env.py:Sized, kwargs: {size: 3}", "§env.py:Sized"), "__init__ needs the argument `size`"),
    ("kwargs of nothing", ("math: {path: env.py:Env}", "math: {path: env.py:Env, kwargs: {§size: 3}}"),
     "__init__ takes no `size`"),
    ("kwargs of nobody's constructor", ("env.py:Sized, kwargs: {size: 3}", "env.py:Swapped, kwargs: {§size: 3}"),
     "__init__ takes no `size`"),
    ("no path", ("math: {path: env.py:Env}", "math: §{kwargs: {}}"), "envs.math.path: missing"),
    ("route of a file", (ROUTE, "env: §maths"), (GOOD[GOOD.index("envs:"):GOOD.index("algorithm")], ""),
     "there is no `maths` under `envs`; declare it there"),
]  # fmt: skip

CRITICS = [
    ("missing", ("  one: {", "  §one: {"), ("a}, critic: {}", "a}"), ("critic: {share: one}", "critic: {}"),
     "estimator `gae_chain` needs a critic; add `critic: {}` to policy `one`"),
    ("null", ("  one: {", "  §one: {"), ("a}, critic: {}", "a}, critic: null"), ("critic: {share: one}", "critic: {}"),
     "estimator `gae_chain` needs a critic; add `critic: {}` to policy `one`"),
    ("unread", ("critic: {}, ", "§critic: {}, "), ("critic: {share: one}, ", ""), ("gae_chain", "grpo"),
     "estimator `grpo` does not use values"),
    ("share nobody", ("share: one", "share: §on"), "no policy `on`; did you mean `one`?"),
    ("share itself", ("share: one", "share: §two"), "cannot share itself"),
    ("share a ring", ("critic: {}", "critic: {share: §two}"), "share each other's critic"),
    ("share a sharer", ("agents:\n", "agents:\n  - {name: extra, policy: three}\n"),
     ("policies:\n", "policies:\n  three: {model: {path: c}, critic: {share: §two}}\n"),
     ("nodes:\n  - ", "nodes:\n  - {id: x, agent: extra}\n  - "),
     "itself shares a critic; write `share: one`"),
    ("options of a share", ("{share: one}", "{share: one, §lr: 1.0e-5}"), "the critic is that of policy `one`"),
    ("share of a frozen one", (ONE, "one: {model: {path: a}, frozen: true"),
     ("share: one", "share: §one"), (", train_cycle: 5}\nenvs", "}\nenvs"), "policy `one` has no critic to share"),
    ("frozen", (ONE, "one: {model: {path: a}, frozen: true, §critic: {}"),
     ("{share: one}, train_cycle: 5", "{}"), "a frozen policy needs no critic"),
    ("value clip", ("critic: {}", "critic: {cliprange_value: §0}"), "a number above 0, got 0"),
    ("critic's model", ("critic: {}", "critic: {model: {path: §''}}"), "must not be empty"),
    ("cycle of a frozen policy", ("critic: {}, train_cycle: 5", "frozen: true, §train_cycle: 5"),
     ("{share: one}, train_cycle: 5", "{}"), "has no effect on a frozen policy"),
    ("rate of a frozen policy", ("critic: {}, train_cycle: 5", "frozen: true, §lr: 0.1"),
     ("{share: one}, train_cycle: 5", "{}"), "has no effect on a frozen policy"),
    ("lonely cycle", ("critic: {}, train_cycle: 5", "critic: {}, §train_cycle: 5"), ("one}, train_cycle: 5", "one}"),
     "does not alternate with another"),
    ("two of mappo", ("b}, critic: {share: one}", "a}, §critic: {}"), ("gae_chain", "mappo"),
     "needs one critic for all policies of a model; write `critic: {share: one}` here"),
    ("none of mappo", ("  two: {", "  §two: {"), (", critic: {share: one}", ""), ("gae_chain", "mappo"),
     "estimator `mappo` needs a critic; add `critic: {}` to policy `two`"),
    ("no cycle", ("critic: {}, train_cycle: 5", "critic: {}, train_cycle: §0"), "at least 1, got 0"),
]  # fmt: skip

ALGORITHM = [
    ("shared reward", ("gae_chain}", "gae_chain, §share_reward_in_agent: true}"), "would count it twice"),
    ("lambda of groups", ("{estimator: gae_chain}", "{§lam: 0.9}"), (", critic: {}", ""),
     (", critic: {share: one}", ""), "estimator `grpo` does not use this option"),
    ("groups of gae", ("gae_chain}", "gae_chain, §group_by: [uid]}"), "estimator `gae_chain` does not use this option"),
    ("scale of gae", ("gae_chain}", "gae_chain, §scale: none}"), "does not use this option"),
    ("warmup without critic", ("{estimator: gae_chain}", "{§critic_warmup: 3}"), (", critic: {}", ""),
     (", critic: {share: one}", ""), "does not use this option"),
    ("sampling", ("gae_chain}", "gae_chain, §dynamic_sampling: {}}"), "set `drop_zero_variance: true`"),
    ("batches", ("{estimator: gae_chain}", "{drop_zero_variance: true, dynamic_sampling: {max_batches: §0}}"),
     (", critic: {}", ""), (", critic: {share: one}", ""), "least 1"),
    ("loss", ("gae_chain}", "gae_chain, policy_loss: §gsop}"), "did you mean `gspo`?"),
    ("sequences", ("gae_chain}", "gae_chain, policy_loss: gspo, loss_agg: §token-mean}"), "gspo averages over each"),
    ("kl in reward", ("  one:", "  §one:"), ("two: {", "two: {reference: true, "),
     ("gae_chain}", "gae_chain, kl_reward_coef: 0.1}"), "algorithm.kl_reward_coef is above 0, so policy `one` needs"),
    ("reward of mappo", ("gae_chain}", "mappo, §share_reward_in_agent: true}"), "mappo carries the last agent's"),
    ("stream of gae", ("gae_chain}", "gae_chain, §stream: agent}"), "estimator `gae_chain` does not use this option"),
    ("level of gae", ("gae_chain}", "gae_chain, §level: token}"), "estimator `gae_chain` does not use this option"),
    ("history of ippo", ("gae_chain}", "ippo, §history_chars: 9}"), "estimator `ippo` does not use this option"),
    ("stream of mappo", ("gae_chain}", "mappo, §stream: agent}"), "estimator `mappo` does not use this option"),
    ("stream", ("gae_chain}", "ippo, stream: §row}"), "expected one of `agent`, `call`"),
    ("level", ("gae_chain}", "mappo, level: §word}"), "expected one of `action`, `token`"),
    ("short history", ("gae_chain}", "mappo, history_chars: §1}"), "at least 2, got 1"),
    ("lam range", ("gae_chain}", "gae_chain, lam: §1.5}"), "at most 1, got 1.5"),
    ("turns", ("algorithm:", "episode: {train_turns: §first}\nalgorithm:"), "expected one of `all`, `last`"),
]  # fmt: skip

CHAIN = [
    ("two advantages", (LEARN, "  - §{id: adv2, train: advantage, after: score}\n"
     + LEARN), "one `train: advantage`, for all policies"),
    ("no advantage", ("nodes:\n", "§nodes:\n"),
     (step("adv", "advantage", "", "score", "values"), ""),
     *[(", adv]", "]")] * 3, "one `train: advantage`, for all policies"),
    ("owned advantage", ("train: advantage,", "train: advantage, §policy: one,"), "serves all policies"),
    ("no values", ("  one:", "  §one:"), (step("values", "values", "one", "score"), ""),
     (", values]", "]"), *[("values, ", "")] * 3, "policy `one` has no `train: values`"),
    ("no critic update", ("  one:", "  §one:"), (LEARN, ""), "policy `one` has no `train: critic_update`"),
    ("critic of a sharer", (LEARN, LEARN + step("again", "critic_update", "two", *FIXED).replace("{", "§{")),
     "shares the critic of `one`, whose nodes do this"),
    ("critic of nobody", ("critic: {}, ", ""), ("critic: {share: one}, ", ""), ("{estimator: gae_chain}", "{}"),
     *[(text, "") for text in (step("adv", "advantage", "", "score", "values"), LEARN)],
     *[(", adv]", ", adv_one, adv_two]")] * 2,
     (step("values", "values", "one", "score"),
      step("adv_one", "advantage", "one", "score") + step("adv_two", "advantage", "two", "score")
      + step("values", "values", "one", "score").replace("{", "§{")),
     "policy `one` has no critic"),
    ("early advantage", ("{id: adv", "§{id: adv"), ("[score, values]", "[score]"),
     "advantages need the result of `values`"),
    ("early critic", (LEARN, LEARN.replace("{", "§{").replace(", adv]", "]")), "the update must wait for `adv`"),
    ("others' log-probs", ("{id: up_one", "§{id: up_one"),
     (step("up_one", "update", "one", *FIXED)[4:],
      step("up_one", "update", "one", "old_one", "values", "adv")[4:]),
     "the update must wait for `old_two`"),
]  # fmt: skip

CASES = [
    pytest.param(base, case[1:-1], case[-1], id=f"{title}-{case[0]}")
    for title, base, cases in (
        ("condition", GOOD, CONDITIONS),
        ("loop", GOOD, LOOPS),
        ("vote", GOOD, VOTES),
        ("env", GOOD, ENVS),
        ("critic", GOOD, CRITICS),
        ("algorithm", GOOD, ALGORITHM),
        ("chain", TRAIN, CHAIN),
    )
    for case in cases
]


def test_who_depends_on_one_node_of_a_loop_may_ask_for_the_others(load_text):
    text = GOOD.replace("after: [pro]}", "after: [pro], when: {node: contra, exists: true}}")
    assert load_text(text).node("note").when.node == "contra"


@pytest.mark.parametrize("base", [GOOD, TRAIN, OWN_CRITICS])
def test_the_file_that_the_cases_break_is_good(base, load_text):
    assert load_text(base).dag_id == "demo"


@pytest.mark.parametrize(("base", "edits", "message"), CASES)
def test_one_mistake_is_one_problem_at_its_place(base, edits, message, expect_one_problem):
    expect_one_problem(base, edits, message)
