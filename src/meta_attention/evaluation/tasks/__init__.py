"""Tasks with known need: which tokens want full attention is known, so routes can be judged.

``recall`` is made of symbols, ``needle`` and ``multi_key`` of text; all are drawn on the fly,
seeded and of any length. A model's answers and routes are reduced to a :class:`TaskResult`.
``facts`` asks pretrained models, in plain words.
"""

from meta_attention.evaluation.tasks.base import NOT_ASKED, Example, Task, TaskDataset
from meta_attention.evaluation.tasks.evaluate import TaskEvaluation, evaluate_task
from meta_attention.evaluation.tasks.facts import FactResult, FactTask, measure_facts
from meta_attention.evaluation.tasks.need import NeedOfLayer, TaskResult, TaskTally
from meta_attention.evaluation.tasks.recall import RecallTask
from meta_attention.evaluation.tasks.retrieval import RetrievalTask
from meta_attention.evaluation.tasks.spec import TASK_SIZES, TaskSpec

__all__ = [
    "NOT_ASKED",
    "TASK_SIZES",
    "Example",
    "FactResult",
    "FactTask",
    "NeedOfLayer",
    "RecallTask",
    "RetrievalTask",
    "Task",
    "TaskDataset",
    "TaskEvaluation",
    "TaskResult",
    "TaskSpec",
    "TaskTally",
    "evaluate_task",
    "measure_facts",
]
