"""The public names: the types that users write against, and five verbs.

    import verl_dag

    workflow = verl_dag.load("workflow.yaml", algorithm={"estimator": "rloo"})
    episode = verl_dag.play(workflow, "What is 2 + 3?", lambda messages: "5")
    run = verl_dag.train("workflow.yaml", data={"train_files": "train.parquet"}, output_dir="outputs/first")

Invariant: a name is loaded when it is first asked for, so the import costs nothing, and `load` and `play` need neither
Ray nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipe import dag

if TYPE_CHECKING:
    from recipe.dag import *  # noqa: F403
    from recipe.dag.app.verbs import evaluate, load, play, read_run, train

__version__ = dag.__version__
__all__ = ["evaluate", "load", "play", "read_run", "train"]
__all__ += dag.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dag if name in dag.__all__ else import_module("recipe.dag.app.verbs"), name)
