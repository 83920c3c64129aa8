"""Tasks: the kind of a federation's targets, its networks' outputs, and the counts that evaluation records.

A federation has one task. Each is a file of this package; to add your own, subclass :class:`Task`. Metrics derive from
counts that add up over batches and clients, so that pooled values need no sample twice.
"""

from .catalog import METRICS as METRICS
from .catalog import TASKS as TASKS
from .catalog import describe_task as describe_task
from .catalog import find_kind as find_kind
from .catalog import infer_task as infer_task
from .catalog import restore_task as restore_task
from .classification import CLASSIFICATION as CLASSIFICATION
from .classification import Classification as Classification
from .metrics import Metric as Metric
from .multilabel import Multilabel as Multilabel
from .regression import Regression as Regression
from .segmentation import Segmentation as Segmentation
from .survival import Survival as Survival
from .task import Task as Task
